"""The attempts whose ranks live here: the token of each (in memory only), its parent, and the orders for its ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.agent.gangs import GangKey
from phalanx.api.agent.v1.rank_service_pb2 import RankOrder
from phalanx.rpc.errors import FailedPrecondition, Superseded

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. parent: attempt and step of the checkpoint it starts from. token: for calls on its behalf. save_s:
    how long a commit waits for the parts of all ranks; 0: as long as the checkpoint service does by itself.
    """

    key: GangKey
    parent: tuple[int, int] | None
    token: str = field(repr=False)
    save_s: float = 0.0


class Attempts:
    """Attempts by job, and their orders in the order in which they were given. Safe from any thread."""

    def __init__(self) -> None:
        self._open: dict[GangKey, Attempt] = {}
        self._orders: dict[GangKey, list[RankOrder.ValueType]] = {}
        self._changed = threading.Condition()

    def open(self, attempt: Attempt) -> None:
        """Its ranks are about to start."""
        with self._changed:
            self._open[attempt.key] = attempt
            self._orders[attempt.key] = []

    def close(self, key: GangKey) -> None:
        """Its ranks are gone; the token is forgotten."""
        with self._changed:
            self._open.pop(key, None)
            self._orders.pop(key, None)
            self._changed.notify_all()

    def get(self, key: GangKey) -> Attempt:
        """Raises Superseded where a newer attempt of the job lives here, FailedPrecondition where this one does not."""
        with self._changed:
            found = self._open.get(key)
            newer = [each.attempt for each in self._open if each.job == key.job and each.attempt > key.attempt]
        if found is not None:
            return found
        if newer:
            raise Superseded(
                str(key), expected=f"attempt {max(newer)}, the newest", remedy="nothing: the newer attempt goes on"
            )
        raise FailedPrecondition(
            str(key), expected="an attempt whose ranks this agent holds", remedy="let train start it on this node"
        )

    def give(self, key: GangKey, order: RankOrder.ValueType) -> None:
        """Adds an order for the ranks. Raises as `get` does."""
        self.get(key)
        with self._changed:
            self._orders.get(key, []).append(order)
            self._changed.notify_all()

    def orders(self, key: GangKey, after: int, over: threading.Event) -> Iterator[tuple[int, RankOrder.ValueType]]:
        """Number (from 1) and order of each order after `after`, as they come, until the attempt closes or `over`."""
        while not over.is_set():
            with self._changed:
                if key not in self._orders:
                    return
                given = self._orders[key][after:]
                if not given:
                    self._changed.wait(LOOK_S)
                    continue
            for order in given:
                after += 1
                yield after, order
