"""Fields of a row of published measurements, as far as they are read: what is of another type counts as left out, and a
figure that can't be is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import PhalanxError

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
_FIGURES: Mapping[str, Mapping[str, float]] = {
    "model": {"params": 1e15, "active_params": 1e15},
    "cluster": {"hbm_tbps": 1e3, "power_limit_w": 1e5},
}
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "model": ("name", "activation"),
    "cluster": ("gpu", "interconnect", "topology"),
    "software": ("stack",),
}


def checked(row: Row, said: list[str]) -> dict[str, Any]:
    """The row with its four parts as objects, and only fields that can be read in them; what was left out goes to
    `said`. Raises PhalanxError for a number below 0, not finite, too large, or broken where only a whole one can be."""
    clean = dict(row)
    for part in ("model", "cluster", "parallel", "software"):
        given = row.get(part)
        if given is not None and not isinstance(given, Mapping):
            said.append(f"{part} is no object: taken as not given")
        fields = dict(given) if isinstance(given, Mapping) else {}
        for name in _TEXTS.get(part, ()):
            if fields.get(name) is not None and not isinstance(fields[name], str):
                said.append(f"{part}.{name} is no text: taken as not given")
                del fields[name]
        for table, whole in ((_COUNTS, True), (_FIGURES, False)):
            for name, most in table.get(part, {}).items():
                _check_number(fields, f"{part}.{name}", most, said, whole=whole)
        clean[part] = fields
    return clean


def _check_number(fields: dict[str, Any], path: str, most: float, said: list[str], *, whole: bool) -> None:
    name = path.partition(".")[2]
    value = fields.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        said.append(f"{path} is no number: taken as not given")
        del fields[name]
        return
    if not 0 <= value <= most or (whole and not math.isclose(value, round(value), abs_tol=1e-9)):
        kind = "a whole number" if whole else "a number"
        raise PhalanxError(path, value=value, expected=f"{kind} from 0 to {most:,.0f}", remedy="correct the row")
    if whole:
        fields[name] = round(value)
    if value == 0 and name in _NEVER_0:
        said.append(f"{path} is 0: taken as not given")
        del fields[name]


_NEVER_0 = frozenset({"per_node", "count", "nvlink_domain", "dp", "vp", "micro_batch", "global_batch", "head_dim"})
