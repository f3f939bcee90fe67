"""Step records: what a rank was fed and what a step gave, as columns in a safetensors object that any reader of the
format opens.

One row a window and one row a step; layout and meaning of each column are in docs/formats/records.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from phalanx.core.digest import BytesLike, canonical_json
from phalanx.core.step_parts import Part
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import RecordsName

Int64: TypeAlias = npt.NDArray[np.int64]
FORMAT: Final = "phalanx.records/2"
WITHOUT_PARTS: Final = "phalanx.records/1"  # of the parts of a step it has data_wait_s alone


def _no_rows() -> npt.NDArray[Any]:
    """The default of a column that came later."""
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class WindowRows:
    """One row for each of n windows, and their m segments flattened.

    step, position int64[n]: the global batch (from 1) and the window's place on the token grid (from 0). weight
    float32[n]: of its loss.
    xxh3 uint64[n]: XXH3 (64 bits, seed 0) over the window's input tokens as little-endian uint32, as the model received
    them.
    segment_window int64[m]: row index of the window that the segment belongs to, not decreasing; shard, member, offset,
    length int64[m]: the tokens [offset, offset + length) of a member, in the order in which the window holds them.
    """

    step: Int64
    position: Int64
    weight: npt.NDArray[np.float32]
    xxh3: npt.NDArray[np.uint64]
    segment_window: Int64
    shard: Int64
    member: Int64
    offset: Int64
    length: Int64

    def __post_init__(self) -> None:
        _require_columns(self, _WINDOW_DTYPES)
        _require_one_length(self, ("step", "position", "weight", "xxh3"))
        _require_one_length(self, ("segment_window", "shard", "member", "offset", "length"))
        window = self.segment_window
        if len(window) and (window[0] < 0 or window[-1] >= len(self) or (np.diff(window) < 0).any()):
            raise ValueError("segment_window must name rows of the windows and must not decrease")
        if len(self) and (self.position.min() < 0 or self.step.min() < 1):
            raise ValueError("a window needs a position >= 0 and a step >= 1; surplus slots have no row")
        low = min((int(column.min()) for column in (self.shard, self.member, self.offset) if len(column)), default=0)
        if low < 0 or (len(self.length) and self.length.min() < 1):
            raise ValueError("a segment needs shard, member and offset >= 0 and at least one token")

    def __len__(self) -> int:
        return len(self.position)

    @staticmethod
    def concatenate(parts: Sequence[WindowRows]) -> WindowRows:
        """The rows of `parts` one after another; none give no rows."""
        if not parts:
            return WindowRows(**{name: np.zeros(0, dtype) for name, dtype in _WINDOW_DTYPES.items()})
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _WINDOW_DTYPES}
        starts = np.cumsum([0] + [len(part) for part in parts[:-1]])
        columns["segment_window"] = np.concatenate(
            [part.segment_window + start for part, start in zip(parts, starts, strict=True)]
        )
        return WindowRows(**columns)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """One row for each of n steps: step int64 (from 1), loss and gradient_norm float64 (not finite for a skipped
    update), valid_tokens int64 (targets that counted), step_time_s float64 (seconds from begin to end), and the parts
    of its wall time, float64 (see `StepParts`; NaN where an older format didn't have them), and
    replica_bytes int64 (what all ranks handed to collectives over `dp_replicate`, where the trainer itself calls them;
    0 where fully_shard sums gradients, and in records that don't have it), and
    expert_worst, expert_mean, expert_idle, balance_loss (see `ExpertLoad`) and loss_scale (by which float16 multiplied
    the loss), float64, NaN where there are none.
    """

    step: Int64
    loss: npt.NDArray[np.float64]
    gradient_norm: npt.NDArray[np.float64]
    valid_tokens: Int64
    step_time_s: npt.NDArray[np.float64]
    data_wait_s: npt.NDArray[np.float64]
    forward_s: npt.NDArray[np.float64]
    backward_s: npt.NDArray[np.float64]
    communication_s: npt.NDArray[np.float64]
    optimizer_s: npt.NDArray[np.float64]
    checkpoint_s: npt.NDArray[np.float64]
    evaluation_s: npt.NDArray[np.float64]
    rest_s: npt.NDArray[np.float64]
    replica_bytes: Int64 = field(default_factory=_no_rows)
    expert_worst: npt.NDArray[np.float64] = field(default_factory=_no_rows)
    expert_mean: npt.NDArray[np.float64] = field(default_factory=_no_rows)
    expert_idle: npt.NDArray[np.float64] = field(default_factory=_no_rows)
    balance_loss: npt.NDArray[np.float64] = field(default_factory=_no_rows)
    loss_scale: npt.NDArray[np.float64] = field(default_factory=_no_rows)

    def __post_init__(self) -> None:
        for name in _LATER:
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.full(len(self.step), _nothing(name), _STEP_DTYPES[name]))
        _require_columns(self, _STEP_DTYPES)
        _require_one_length(self, tuple(_STEP_DTYPES))
        if len(self) and self.step.min() < 1:
            raise ValueError("a step's number counts from 1")

    def __len__(self) -> int:
        return len(self.step)

    @property
    def overflowed(self) -> npt.NDArray[np.bool_]:
        """The steps of which no more is wrong than that gradients overflowed under a scaled loss, which a lower scale
        follows (`phalanx.trainer.loss_scale`): their update was left out, their loss holds.
        """
        return np.isfinite(self.loss) & ~np.isfinite(self.gradient_norm) & (self.loss_scale > 1)

    @staticmethod
    def concatenate(parts: Sequence[StepRows]) -> StepRows:
        """The rows of `parts` one after another; none give no rows."""
        if not parts:
            return StepRows(**{name: np.zeros(0, dtype) for name, dtype in _STEP_DTYPES.items()})
        return StepRows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _STEP_DTYPES})


_SPECIAL: Final[Mapping[str, type[np.generic]]] = {
    "weight": np.float32,
    "xxh3": np.uint64,
    "loss": np.float64,
    "gradient_norm": np.float64,
    "step_time_s": np.float64,
    "expert_worst": np.float64,
    "expert_mean": np.float64,
    "expert_idle": np.float64,
    "balance_loss": np.float64,
    "loss_scale": np.float64,
    **{part.value: np.float64 for part in Part},
}
_WINDOW_DTYPES: Final = {each.name: np.dtype(_SPECIAL.get(each.name, np.int64)) for each in fields(WindowRows)}
_STEP_DTYPES: Final = {each.name: np.dtype(_SPECIAL.get(each.name, np.int64)) for each in fields(StepRows)}

# Columns that came later: left out where they say nothing throughout.
_LATER: Final = ("replica_bytes", "expert_worst", "expert_mean", "expert_idle", "balance_loss", "loss_scale")


def _nothing(column: str) -> float:
    return 0 if _STEP_DTYPES[column].kind == "i" else np.nan


def _says_something(name: str, column: npt.NDArray[Any]) -> bool:
    return bool((column != 0).any() if _STEP_DTYPES[name].kind == "i" else (~np.isnan(column)).any())


def _require_columns(rows: WindowRows | StepRows, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    for name, dtype in dtypes.items():
        column = getattr(rows, name)
        if column.ndim != 1 or column.dtype != dtype:
            raise ValueError(f"{name} must be one column of {dtype}, not {column.ndim} dimensions of {column.dtype}")


def _require_one_length(rows: WindowRows | StepRows, names: Sequence[str]) -> None:
    lengths = {name: len(getattr(rows, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")


def encode_records(name: RecordsName, windows: WindowRows, steps: StepRows) -> bytes:
    """The object that stores the rows; equal rows give equal bytes. Raises ValueError for rows outside the steps of
    `name`.
    """
    _require_steps(name, windows, steps)
    tensors = {f"windows.{column}": np.ascontiguousarray(getattr(windows, column)) for column in _WINDOW_DTYPES}
    tensors |= {
        f"steps.{column}": np.ascontiguousarray(getattr(steps, column))
        for column in _STEP_DTYPES
        if column not in _LATER or _says_something(column, getattr(steps, column))
    }
    # One key only: safetensors keeps no order among several, and the bytes would differ from run to run.
    return bytes(save(tensors, metadata={"phalanx": _header(name)}))


def decode_records(key: str, name: RecordsName, data: BytesLike) -> tuple[WindowRows, StepRows]:
    """The rows stored in `data`, which was read from `key`. Raises DamagedObject for anything but what `encode_records`
    wrote, or that of a later version did: columns of steps that this one does not know are passed over.
    """
    data = bytes(data)
    try:
        tensors = load(data)
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes]).get("__metadata__", {}).get("phalanx")
        if header == _header(name, WITHOUT_PARTS):
            unknown = np.full(len(tensors["steps.step"]), np.nan)
            tensors = {f"steps.{part.value}": unknown for part in Part} | tensors
        elif header != _header(name):
            raise ValueError(f"its header is {header!r}, not {_header(name)!r}")
        windows = WindowRows(**{column: tensors.pop(f"windows.{column}") for column in _WINDOW_DTYPES})
        present = [column for column in _STEP_DTYPES if column not in _LATER or f"steps.{column}" in tensors]
        steps = StepRows(**{column: tensors.pop(f"steps.{column}") for column in present})
        if strange := sorted(name for name in tensors if not name.startswith("steps.")):
            raise ValueError(f"unknown columns {strange}")
        _require_steps(name, windows, steps)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedObject(key, f"holds no step records of format {FORMAT!r}: {error}") from error
    return windows, steps


def _header(name: RecordsName, format_: str = FORMAT) -> str:
    return canonical_json({"format": format_, **asdict(name)}).decode()


def _require_steps(name: RecordsName, windows: WindowRows, steps: StepRows) -> None:
    if not 1 <= name.first_step <= name.last_step:
        raise ValueError(f"steps {name.first_step} to {name.last_step} are no range of steps from 1")
    for column in (windows.step, steps.step):
        if len(column) and (column.min() < name.first_step or column.max() > name.last_step):
            raise ValueError(f"rows of steps outside {name.first_step} to {name.last_step}")
