"""The steps of a run as columns: one row a step, ascending, a step that is done again standing once.

A curve is held in memory as one array of ROW and stored in pieces of `PIECE_STEPS` consecutive steps, so that a million
steps cost 84 MB here and a few thousand rows there, and one more step rewrites one piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import nan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ROW = np.dtype(
    [
        ("step", "<i8"),
        ("loss", "<f8"),
        ("tokens_per_second", "<f8"),
        ("gradient_norm", "<f8"),
        ("step_time_s", "<f8"),
        ("data_wait_s", "<f8"),
        ("learning_rate", "<f8"),
        ("attempt", "<i8"),
        ("expert_worst", "<f4"),
        ("expert_mean", "<f4"),
        ("expert_idle", "<f4"),
        ("balance_loss", "<f4"),
        ("loss_scale", "<f4"),
    ]
)
LATER = ("expert_worst", "expert_mean", "expert_idle", "balance_loss", "loss_scale")  # which most runs don't have
PIECE_STEPS = 1024
Rows: TypeAlias = npt.NDArray[np.void]  # of ROW

_LEAST_CAPACITY = 64
_VERSION = b"\x02"  # zlib begins with another byte


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step. Figures that are unknown or not finite are NaN. Times in seconds. Those behind `attempt`: see the
    contract's Curve.
    """

    step: int
    loss: float
    tokens_per_second: float
    gradient_norm: float
    step_time_s: float
    data_wait_s: float
    learning_rate: float
    attempt: int
    expert_worst: float = nan
    expert_mean: float = nan
    expert_idle: float = nan
    balance_loss: float = nan
    loss_scale: float = nan


class Curve:
    """The rows of one run, and from which step on they differ from what is stored."""

    def __init__(self, rows: Rows | None = None) -> None:
        self._rows = np.zeros(_LEAST_CAPACITY, ROW) if rows is None or not len(rows) else rows.copy()
        self._length = 0 if rows is None else len(rows)
        self._unsaved_from: int | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Rows:
        """All rows; a view that holds until the next change."""
        return self._rows[: self._length]

    @property
    def last_step(self) -> int:
        """0 for none."""
        return int(self._rows["step"][self._length - 1]) if self._length else 0

    def put(self, figures: StepFigures) -> bool:
        """Adds a step, or replaces it. Where another attempt did it before, that one's later steps go with it. False
        where an attempt after that of `figures` has done the step.
        """
        at = self._index(figures.step)
        if at < self._length:
            standing = int(self._rows["attempt"][at])
            if standing > figures.attempt:
                return False
            if standing < figures.attempt:
                self.cut(figures.step - 1)
            elif int(self._rows["step"][at]) != figures.step:
                self._insert(at)
        if at == self._length:
            self._grow()
            self._length += 1
        self._rows[at] = astuple(figures)
        self._changed(figures.step)
        return True

    def cut(self, last_step: int) -> bool:
        """Takes away the steps behind `last_step`; whether there were any."""
        at = self._index(last_step + 1)
        if at == self._length:
            return False
        self._changed(int(self._rows["step"][at]))
        self._length = at
        return True

    def fill(self, rows: Rows) -> int | None:
        """Adds those of `rows` (ascending) whose steps are missing; the first one, None where none was."""
        missing = rows[~np.isin(rows["step"], self.rows["step"])]
        if not len(missing):
            return None
        merged = np.concatenate([self.rows, missing])
        self._rows = merged[np.argsort(merged["step"], kind="stable")]
        self._length = len(self._rows)
        first = int(missing["step"][0])
        self._changed(first)
        return first

    def behind(self, step: int) -> Rows:
        """The rows of the steps after `step`."""
        return self._rows[self._index(step + 1) : self._length]

    def has_all(self, first_step: int, last_step: int) -> bool:
        """Whether every step of the range is there."""
        return self._index(last_step + 1) - self._index(first_step) == last_step - first_step + 1

    def take_unsaved(self) -> tuple[int, dict[int, bytes]] | None:
        """The number of the first piece that changed, and all pieces from there on, which replace what is stored from
        it on; None where nothing changed.
        """
        if self._unsaved_from is None:
            return None
        first = self._unsaved_from // PIECE_STEPS
        self._unsaved_from = None
        return first, pieces_of(self.behind(first * PIECE_STEPS - 1))

    @property
    def is_saved(self) -> bool:
        """Whether nothing changed since the last `take_unsaved`."""
        return self._unsaved_from is None

    def save_again(self, step: int) -> None:
        """What was taken from `step` on could not be stored."""
        self._changed(step)

    def _index(self, step: int) -> int:
        """Of the first row whose step is not less; the end for the step that comes next, which is the common case."""
        if not self._length or step > int(self._rows["step"][self._length - 1]):
            return self._length
        return int(np.searchsorted(self.rows["step"], step))

    def _insert(self, at: int) -> None:
        self._grow()
        self._rows[at + 1 : self._length + 1] = self._rows[at : self._length].copy()
        self._length += 1

    def _grow(self) -> None:
        if self._length == len(self._rows):
            grown = np.zeros(max(_LEAST_CAPACITY, 2 * self._length), ROW)
            grown[: self._length] = self.rows
            self._rows = grown

    def _changed(self, step: int) -> None:
        self._unsaved_from = step if self._unsaved_from is None else min(step, self._unsaved_from)


def pieces_of(rows: Rows) -> dict[int, bytes]:
    """The stored form of the rows, by piece: column after column, compressed."""
    numbers = rows["step"] // PIECE_STEPS
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return {
        int(numbers[start]): _encode(rows[start:end])
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)
    }


def rows_of(pieces: Iterable[bytes]) -> Rows:
    """The rows of pieces in ascending order. Raises ValueError for bytes that `pieces_of` did not make."""
    decoded = [_decode(piece) for piece in pieces]
    return np.concatenate(decoded) if decoded else np.zeros(0, ROW)


def rows_from(columns: Mapping[str, npt.ArrayLike], length: int) -> Rows:
    """Rows with the given columns; the others are NaN, or 0 for whole numbers."""
    rows = np.zeros(length, ROW)
    for name in ROW.names or ():
        rows[name] = columns.get(name, np.nan if ROW[name].kind == "f" else 0)
    return rows


def overflowed(rows: Rows) -> npt.NDArray[np.bool_]:
    """The steps whose gradients overflowed under a scaled loss: nothing is wrong with the run."""
    found: npt.NDArray[np.bool_] = np.isfinite(rows["loss"]) & ~np.isfinite(rows["gradient_norm"])
    return found & (rows["loss_scale"] > 1)


def _encode(rows: Rows) -> bytes:
    columns = b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in ROW.names or ())
    return _VERSION + zlib.compress(columns, 1)


def _decode(piece: bytes) -> Rows:
    """Pieces of the version before have no mark, and none of the columns in `LATER`."""
    is_marked = piece.startswith(_VERSION)
    try:
        data = zlib.decompress(piece.removeprefix(_VERSION))
    except zlib.error as error:
        raise ValueError(f"a piece that is damaged: {error}") from error
    names = [name for name in ROW.names or () if is_marked or name not in LATER]
    length, rest = divmod(len(data), sum(ROW[name].itemsize for name in names))
    if rest:
        raise ValueError(f"a piece of {len(data)} bytes")
    columns, offset = {}, 0
    for name in names:
        columns[name] = np.frombuffer(data, ROW[name], length, offset)
        offset += length * ROW[name].itemsize
    return rows_from(columns, length)


def thinned(rows: Rows, max_points: int) -> Rows:
    """At most `max_points` of the rows (0: all): of each piece of equal length the least and the greatest loss, and the
    first and last row. A loss that is not finite counts as the greatest, so that it stays in sight.
    """
    if not max_points or len(rows) <= max_points:
        return rows
    if max_points < 4:
        return rows[np.unique(np.linspace(len(rows) - 1, 0, max_points).astype(np.int64))]
    num_pieces = (max_points - 2) // 2
    width = -(-(len(rows) - 2) // num_pieces)
    loss = rows["loss"][1:-1]
    padding = num_pieces * width - len(loss)
    finite = np.where(np.isfinite(loss), loss, np.inf)
    low = np.append(finite, np.full(padding, np.inf)).reshape(num_pieces, width)
    high = np.append(finite, np.full(padding, -np.inf)).reshape(num_pieces, width)
    starts = 1 + width * np.arange(num_pieces)
    inner = np.concatenate([starts + low.argmin(axis=1), starts + high.argmax(axis=1)])
    kept = np.unique(np.concatenate([[0, len(rows) - 1], inner[inner < len(rows) - 1]]))
    chosen: Rows = rows[kept]
    return chosen
