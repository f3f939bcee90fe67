"""Small facts that rank 0 finds out and every rank must know, over the gang's key-value store: JSON only, a deadline on
each wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from phalanx.core.digest import canonical_json


class KeyValueStore(Protocol):
    """What is used of torch.distributed's Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Exchange:
    """Every rank asks the same questions in the same order; rank 0 answers each once."""

    def __init__(self, store: KeyValueStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._num_asked = 0

    def share(self, make: Callable[[], Mapping[str, Any]], deadline_s: float) -> dict[str, Any]:
        """What `make` gives on rank 0, on every rank. The others raise torch's DistStoreError when rank 0 is late."""
        self._num_asked += 1
        key = f"exchange/{self._num_asked}"
        if self._rank == 0:
            self._store.set(key, canonical_json(make()).decode())
        else:
            self._store.wait([key], timedelta(seconds=deadline_s))
        answer = json.loads(self._store.get(key))
        assert isinstance(answer, dict)
        return answer
