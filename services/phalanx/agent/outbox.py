"""Reports on their way to train: numbered, kept until acknowledged, sent again after a lost stream. Pure; whoever
shares it locks it.

Records wait unnumbered until there is room among the unacknowledged reports, so that a long partition costs the oldest
droppable records (counted), never a number, an exit, a commit or a cause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Item]):
    """Something to tell about an attempt. is_batched: may share a report with its neighbours of the same attempt.
    is_droppable: may be left out when too much waits.
    """

    job: str
    attempt: int
    item: Item
    is_batched: bool = True
    is_droppable: bool = False


@dataclass(frozen=True, slots=True)
class Numbered(Generic[Item]):
    """A report. items: more than one only where all of them are batched."""

    number: int
    job: str
    attempt: int
    items: tuple[Item, ...]
    is_batched: bool


@dataclass(slots=True)
class Outbox(Generic[Item]):
    """What is not yet safe with train. max_waiting: droppable items that may wait. max_unacknowledged: reports that are
    numbered and not acknowledged. max_batch: items of one report.
    """

    max_waiting: int = 20_000
    max_unacknowledged: int = 4096
    max_batch: int = 200
    num_dropped: int = 0
    _last_number: int = 0
    _num_droppable: int = 0
    _waiting: deque[Waiting[Item]] = field(default_factory=deque)
    _unacknowledged: deque[Numbered[Item]] = field(default_factory=deque)

    def put(self, waiting: Waiting[Item]) -> None:
        """Takes something to tell, behind what waits; the oldest droppable item makes room where too many wait."""
        self._waiting.append(waiting)
        self._num_droppable += waiting.is_droppable
        if self._num_droppable > self.max_waiting:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Kept items in front of it change places with nothing: the order of all others stays."""
        index = next(index for index, each in enumerate(self._waiting) if each.is_droppable)
        del self._waiting[index]
        self._num_droppable -= 1
        self.num_dropped += 1

    def next_report(self) -> Numbered[Item] | None:
        """The next report to send for the first time; None while nothing waits, or too much is unacknowledged."""
        if not self._waiting or len(self._unacknowledged) >= self.max_unacknowledged:
            return None
        first = self._waiting.popleft()
        taken = [first]
        while first.is_batched and self._waiting and len(taken) < self.max_batch and _alike(first, self._waiting[0]):
            taken.append(self._waiting.popleft())
        self._num_droppable -= sum(each.is_droppable for each in taken)
        self._last_number += 1
        report = Numbered(
            self._last_number, first.job, first.attempt, tuple(each.item for each in taken), first.is_batched
        )
        self._unacknowledged.append(report)
        return report

    def acknowledge(self, number: int) -> tuple[Numbered[Item], ...]:
        """Lets go of every report up to `number`; those, in order."""
        freed = []
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            freed.append(self._unacknowledged.popleft())
        return tuple(freed)

    @property
    def unacknowledged(self) -> tuple[Numbered[Item], ...]:
        """What a new stream sends again, in order."""
        return tuple(self._unacknowledged)

    @property
    def num_unacknowledged(self) -> int:
        """Reports that were sent and are not safe yet."""
        return len(self._unacknowledged)

    @property
    def has_waiting(self) -> bool:
        """Whether something has no number yet."""
        return bool(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether all is told and acknowledged."""
        return not self._waiting and not self._unacknowledged


def _alike(first: Waiting[Item], other: Waiting[Item]) -> bool:
    return other.is_batched and (other.job, other.attempt) == (first.job, first.attempt)
