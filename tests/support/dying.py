"""A process that dies at a numbered operation on its store, played within this one: nothing that it does afterwards,
cleaning up included, reaches the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress

from phalanx.objects import ObjectStore
from phalanx.objects.faults import Call, Fault, FaultyStore


class Killed(BaseException):
    """The process ended here. As a real end it passes by every `except Exception`."""


def _die(call: Call) -> None:
    raise Killed(f"{call.number}: {call.operation} {call.key}")


class DyingStore(FaultyStore):
    """The store of a process that dies at its operation number `at` (from 0), before it takes effect or right after."""

    def __init__(self, store: ObjectStore, at: int, *, after: bool = False) -> None:
        here = Fault(lambda call: call.number == at, **{"after" if after else "before": _die})
        super().__init__(store, [here, Fault(lambda call: call.number > at, before=_die)], streams=True)
        self.inner, self._at = store, at

    @property
    def is_dead(self) -> bool:
        """Whether the process came as far as its end."""
        return len(self.calls) > self._at


def every_death(
    make: Callable[[str], ObjectStore], act: Callable[[ObjectStore], object], step: int = 1
) -> Iterator[tuple[str, ObjectStore]]:
    """`act` on a store of `make(name)`, killed before and after each `step`th of its operations until it comes through
    alive. Yields, after each death and after the life, where it ended and the store that is left.
    """
    for at in itertools.count(0, step):
        for after in (False, True):
            where = f"{at}-{'after' if after else 'before'}"
            store = make(where)
            dying = DyingStore(store, at, after=after)
            with suppress(Killed):
                act(dying)
            yield where, store
            if not dying.is_dead:
                return
