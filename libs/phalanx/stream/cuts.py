"""Windows of one source cut into segments, and their tokens put into the slots that ask for them; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.stream.order import Order
from phalanx.stream.rows import SlotSegments
from phalanx.stream.segments import SegmentColumns

Int64 = NDArray[np.int64]
NO_PLACES: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class WindowCut:
    """k windows of `source`, sorted, and the slots that they go to; int64 [k] each.

    is_cut bool [k]: the window behind is taken out of training, so its first token is no target. segments: of all the
    windows, `num_inputs` of them, then of the single tokens behind those windows that need one and are not followed by
    their successor here (`needs_token` bool [k]). range_of: the window of each segment, as a number below k.
    """

    source: int
    first_shard: int
    seq_len: int
    slots: Int64
    windows: Int64
    is_cut: NDArray[np.bool_]
    needs_token: NDArray[np.bool_]
    segments: SegmentColumns
    num_inputs: int
    range_of: Int64

    def rows(self, gathered: NDArray[np.unsignedinteger], num_slots: int) -> NDArray[np.unsignedinteger] | None:
        """The rows [num_slots, seq_len + 1] of all slots without a copy, where these windows follow each other in them;
        None elsewhere. The last token of a row is the first of the next, in the same memory.
        """
        is_run = len(self.slots) == num_slots and not self.needs_token[:-1].any() and self.needs_token[-1]
        if not is_run or (self.slots != np.arange(num_slots)).any():
            return None
        row_bytes = self.seq_len * gathered.itemsize
        rows: NDArray[np.unsignedinteger] = np.ndarray(
            (num_slots, self.seq_len + 1), gathered.dtype, gathered.data, strides=(row_bytes, gathered.itemsize)
        )
        rows.flags.writeable = False
        return rows

    def place(self, gathered: NDArray[np.unsignedinteger], tokens: NDArray[np.unsignedinteger]) -> None:
        """Writes the tokens of all segments into the slots' rows of `tokens` [n, seq_len + 1]."""
        count = len(self.windows)
        inputs = gathered[: count * self.seq_len].reshape(count, self.seq_len)
        behind = np.zeros(count, gathered.dtype)
        behind[:-1] = inputs[1:, 0]
        behind[self.is_cut] = 0
        behind[self.needs_token] = gathered[count * self.seq_len :]
        first, last = int(self.slots[0]), int(self.slots[-1]) + 1
        if last - first == count and (self.slots[1:] > self.slots[:-1]).all():
            rows: slice | Int64 = slice(first, last)
        else:
            rows = self.slots
        tokens[rows, :-1] = inputs
        tokens[rows, -1] = behind

    def documents(self) -> tuple[Int64, Int64]:
        """Places (slot x seq_len + column) at which segments begin, and those of last tokens of documents."""
        lengths, slots = self.segments.length[: self.num_inputs], self.slots[self.range_of]
        begins = np.cumsum(lengths) - lengths + (slots - self.range_of) * self.seq_len
        return begins, (begins + lengths - 1)[self.segments.ends_document[: self.num_inputs]]

    def read(self) -> SlotSegments:
        """What the windows read, for their records."""
        inputs = slice(self.num_inputs)
        part = SegmentColumns(**{name: getattr(self.segments, name)[inputs] for name in _FIELDS})
        return SlotSegments(part, self.slots[self.range_of], self.first_shard)


_FIELDS = tuple(SegmentColumns.__dataclass_fields__)


def cut_windows(
    order: Order, source: int, first_shard: int, slots: Int64, windows: Int64, is_cut: NDArray[np.bool_]
) -> WindowCut:
    """The cut of these windows, at least one."""
    seq_len = order.seq_len
    needs_token = ~is_cut
    needs_token[:-1] &= windows[1:] != windows[:-1] + 1
    begins = windows * seq_len
    behind = begins[needs_token] + seq_len
    segments, range_of = order.between_many(
        np.concatenate([begins, behind]), np.concatenate([begins + seq_len, behind + 1])
    )
    num_inputs = int(np.searchsorted(range_of, len(windows)))
    return WindowCut(
        source=source,
        first_shard=first_shard,
        seq_len=seq_len,
        slots=slots,
        windows=windows,
        is_cut=is_cut,
        needs_token=needs_token,
        segments=segments,
        num_inputs=num_inputs,
        range_of=range_of[:num_inputs],
    )
