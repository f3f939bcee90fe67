"""Which train process acts: the one that came last. The fence is an object, not a lock and not a clock.

Every process creates the next `registry/train/<n>.json` when it starts, and looks, before it acts, whether a later one
is there; then it ends. Between look and act the event log still lets only one of two win a number.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Final

from phalanx.core.digest import canonical_json
from phalanx.lineage import keys
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore

PREFIX: Final = "registry/train/"
LOOK_S: Final = 1.0


class Term:
    """The time of one process. clock: monotonic; looks in storage at most every `LOOK_S`."""

    def __init__(self, root: ObjectStore, number: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = number
        self._root, self._clock = root, clock
        self._looked_s, self._is_over = clock(), False

    @classmethod
    def claim(cls, root: ObjectStore) -> Term:
        """The newest term: every earlier one is over from the moment in which this returns."""
        number = sum(1 for _ in root.list(PREFIX)) + 1
        while True:
            try:
                root.create(_key(number), canonical_json({"format": 1, "number": number, "writer": uuid.uuid4().hex}))
            except ObjectExists:
                number += 1
            else:
                return cls(root, number)

    def is_over(self) -> bool:
        """Whether a later process has begun."""
        if not self._is_over and self._clock() - self._looked_s >= LOOK_S:
            self._is_over, self._looked_s = self._is_there(self.number + 1), self._clock()
        return self._is_over

    def _is_there(self, number: int) -> bool:
        try:
            self._root.info(_key(number))
        except ObjectMissing:
            return False
        return True


def _key(number: int) -> str:
    return f"{PREFIX}{keys.number(number)}.json"
