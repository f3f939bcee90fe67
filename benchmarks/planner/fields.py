"""Fields of a row of published measurements, as far as they are read: what is of another type counts as left out, and a
figure that can't be is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.core.errors import PhalanxError, shortened

Row = Mapping[str, Any]

# Largest value of each number that is read, far above what exists. Counts are whole.
_COUNTS: Mapping[str, Mapping[str, int]] = {
    "model": {
        "layers": 2_000,
        "hidden": 1_000_000,
        "heads": 10_000,
        "kv_heads": 10_000,
        "head_dim": 10_000,
        "ffn": 10_000_000,
        "vocab": 100_000_000,
        "seq": 100_000_000,
        "experts": 100_000,
        "topk": 100_000,
        "moe_ffn": 10_000_000,
        "shared_experts": 1_000,
        "dense_layers": 2_000,
        "q_lora_rank": 1_000_000,
        "kv_lora_rank": 1_000_000,
        "qk_nope_head_dim": 10_000,
        "qk_rope_head_dim": 10_000,
        "v_head_dim": 10_000,
    },
    "cluster": {"per_node": 100_000, "count": 10_000_000, "nvlink_domain": 100_000},
    "parallel": {
        "tp": 10_000,
        "pp": 2_000,
        "cp": 10_000,
        "ep": 100_000,
        "dp": 10_000_000,
        "vp": 2_000,
        "micro_batch": 100_000,
        "global_batch": 10_000_000,
        "grad_accum": 1_000_000,
        "microbatches": 1_000_000,
    },
    "software": {"year": 2_100},
}
# (least, largest) of what need not be whole; 0 counts as not given.
_FIGURES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "model": {"params": (1e3, 1e15), "active_params": (1e3, 1e15)},
    "cluster": {"hbm_tbps": (0.01, 1e3), "power_limit_w": (10, 1e5)},
}
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "model": ("name", "activation"),
    "cluster": ("gpu", "interconnect", "topology"),
    "parallel": ("schedule", "recompute", "precision", "mp_mode", "overlap"),
    "software": ("stack",),
}
_TRUTHS: Mapping[str, tuple[str, ...]] = {"parallel": ("seq_parallel", "async_tp", "torch_compile")}
# Of one of several types: a window is a width, words about it, or whether there is one; a ZeRO stage a number or words.
_MIXED: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "model": {"sliding_window": (str, bool, int)},
    "parallel": {"zero": (str, int, float)},
}
# Fields that sources print and the planner has no use for.
_NOT_USED: Mapping[str, tuple[str, ...]] = {
    "model": ("tokens", "shape_certainty", "layers_certainty", "positions", "parallel_block"),
    "cluster": ("slices",),
    "parallel": ("local_batch", "attention", "moe_note", "fsdp_group", "etp", "pp_partition"),
    "software": (),
}
_MOST_ZERO = 3


def checked(row: Row, said: list[str]) -> dict[str, Any]:
    """The row with its four parts as objects, and only fields that can be read in them; what was left out goes to
    `said`. Raises PhalanxError for a number that is not finite, too small or too large, or broken where only a whole
    one can be."""
    clean = dict(row)
    for part in ("model", "cluster", "parallel", "software"):
        given = row.get(part)
        if given is not None and not isinstance(given, Mapping):
            said.append(f"{part} is no object: taken as not given")
        fields = dict(given) if isinstance(given, Mapping) else {}
        said += _unknown(part, fields)
        for name in _TEXTS.get(part, ()):
            _keep_type(fields, f"{part}.{name}", (str,), "no text", said)
        for name in _TRUTHS.get(part, ()):
            _keep_type(fields, f"{part}.{name}", (bool,), "neither true nor false", said)
        for name, types in _MIXED.get(part, {}).items():
            _keep_type(fields, f"{part}.{name}", types, "of no type that it can have", said)
        for name, most in _COUNTS.get(part, {}).items():
            _check_number(fields, f"{part}.{name}", (0, most), said, whole=True)
        for name, limits in _FIGURES.get(part, {}).items():
            _check_number(fields, f"{part}.{name}", limits, said, whole=False)
        if part == "parallel" and isinstance(fields.get("zero"), int | float):
            _check_number(fields, "parallel.zero", (0, _MOST_ZERO), said, whole=True)
        clean[part] = fields
    return clean


def _keep_type(fields: dict[str, Any], path: str, types: tuple[type, ...], is_else: str, said: list[str]) -> None:
    """Leaves out a field of a type that is none of these; true and false are numbers to Python, but not here."""
    name = path.partition(".")[2]
    value = fields.get(name)
    if value is None or (isinstance(value, types) and (bool in types or not isinstance(value, bool))):
        return
    said.append(f"{path} is {is_else}: taken as not given")
    del fields[name]


def _unknown(part: str, fields: Row) -> list[str]:
    """A sentence for each field that is none of a row's, with the one that may have been meant."""
    tables: tuple[Mapping[str, Iterable[str]], ...] = (_COUNTS, _FIGURES, _TEXTS, _TRUTHS, _MIXED, _NOT_USED)
    known = [name for table in tables for name in table.get(part, ())]
    told = []
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(str(name).lower(), known, n=1)
            meant = f"; {close[0]} may be meant" if close else ""
            told.append(f"{part}.{shortened(str(name))} is no field of a row: not read{meant}")
    return told


def _check_number(
    fields: dict[str, Any], path: str, limits: tuple[float, float], said: list[str], *, whole: bool
) -> None:
    least, most = limits
    name = path.partition(".")[2]
    value = fields.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        said.append(f"{path} is no number: taken as not given")
        del fields[name]
        return
    within = value == 0 or least <= value <= most
    if not within or (whole and value != round(value)):
        kind = "a whole number" if whole else "a number"
        raise PhalanxError(
            path, value=value, expected=f"{kind} from {least:,.6g} to {most:,.0f}", remedy="correct the row"
        )
    if whole:
        fields[name] = round(value)
    if value == 0 and name in _NEVER_0:
        said.append(f"{path} is 0: taken as not given")
        del fields[name]


_NEVER_0 = frozenset(
    {"per_node", "count", "nvlink_domain", "dp", "vp", "micro_batch", "global_batch", "head_dim"}
    | {name for table in _FIGURES.values() for name in table}
)
