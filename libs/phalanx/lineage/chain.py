"""The live rule, pure: which checkpoints of which attempts count.

Attempts form a lineage. Live are the checkpoints on the parent chain back from the highest attempt, those of each
attempt up to the step that its child names. Example: attempt 1 commits steps 5 and 10; attempt 2 names the parent (1,
5) and commits 10 and 15; attempt 1, a zombie by now, commits 15. Live: (1, 5), (2, 10), (2, 15). Whatever attempt 1
still writes changes nothing: opening attempt 2 was the fence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from phalanx.lineage import keys
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import Attempt, CheckpointRef


@dataclass(frozen=True, slots=True)
class Link:
    """One attempt on the chain, and how much of it counts.

    last_step, last_entry: the last checkpoint step and journal entry that its child on the chain names; None at the
    tip, which has no child and counts whole.
    """

    attempt: Attempt
    last_step: int | None = None
    last_entry: int | None = None

    def has_step(self, step: int) -> bool:
        """Whether the attempt's checkpoint at `step` is live: after its parent's step, and up to the one its child
        names.
        """
        parent = self.attempt.parent
        after_parent = parent is None or step > parent.step
        return after_parent and (self.last_step is None or step <= self.last_step)

    def has_entry(self, entry: int) -> bool:
        """Whether the attempt's journal entry of that number is live."""
        return self.last_entry is None or entry <= self.last_entry


def walk(read: Callable[[int], Attempt], tip: int) -> Iterator[Link]:
    """The links from attempt `tip` back to the beginning, newest first, reading each attempt only when it is asked for.

    Raises DamagedObject where a child and its parent contradict each other.
    """
    link = Link(read(tip))
    while link.attempt.parent is not None:
        yield link
        link = _parent_link(link.attempt, read(link.attempt.parent.attempt))
    if link.attempt.journal:
        raise DamagedObject(keys.attempt(link.attempt.number), "has no parent, yet names a journal of ancestors")
    yield link


def _parent_link(child: Attempt, attempt: Attempt) -> Link:
    parent = child.parent
    assert parent is not None and parent.attempt == attempt.number
    known = attempt.parent is None or parent.step > attempt.parent.step
    if parent.attempt >= child.number or not known or not child.journal:
        raise DamagedObject(keys.attempt(child.number), f"names a parent that cannot be: {parent}")
    number, last_entry = child.journal[-1]
    if number != attempt.number or child.journal[:-1] != attempt.journal:
        raise DamagedObject(keys.attempt(child.number), "names other ancestors in its journal than its parent does")
    return Link(attempt, parent.step, last_entry)


def live_chain(attempts: Iterable[Attempt], tip: int | None = None) -> tuple[Link, ...]:
    """The chain that ends at the highest attempt (or at `tip`), oldest first; empty without attempts.

    Raises DamagedObject where an attempt on the chain is missing or contradicts its child.
    """
    by_number = {attempt.number: attempt for attempt in attempts}

    def read(number: int) -> Attempt:
        if number not in by_number:
            raise DamagedObject(keys.attempt(number), "is missing, and the live chain needs it")
        return by_number[number]

    if not by_number and tip is None:
        return ()
    return tuple(walk(read, max(by_number) if tip is None else tip))[::-1]


def live_checkpoints(attempts: Iterable[Attempt], committed: Iterable[CheckpointRef]) -> tuple[CheckpointRef, ...]:
    """Those of `committed` that are live, oldest first; their steps strictly increase."""
    links = {link.attempt.number: link for link in live_chain(attempts)}
    live = (ref for ref in set(committed) if ref.attempt in links and links[ref.attempt].has_step(ref.step))
    return tuple(sorted(live))
