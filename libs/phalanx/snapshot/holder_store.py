"""A job's storage with the memory of other nodes before it: what they keep of one step is read from them, all else from
storage. A rank's share that they do not give is read from storage from then on, and that is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, keys
from phalanx.objects import ObjectStore
from phalanx.snapshot.overlay import Overlay

Counted = TypeVar("Counted", bytes, memoryview)
Found = list[bytes]
Use = Callable[[memoryview], None]
# Has `use` called once with the `length` bytes from `offset` on of the object `key` (not for 0), good until it returns;
# gives the size of the object. Raises OutsideError and PhalanxError where no node gives them.
Ask = Callable[[str, int, int, Use], int]
LOG = logging.getLogger(__name__)


class HolderStore(Overlay):
    """ref: the step that other nodes keep; every object of it lies in storage too. Safe from any thread.

    num_bytes: had from other nodes. storage_bytes: of the step's shares, read from storage. why: of the first of those;
    "" where there was none.
    """

    def __init__(self, storage: ObjectStore, ref: CheckpointRef, ask: Ask) -> None:
        super().__init__(storage)
        self._ref, self._ask = ref, ask
        self.num_bytes = self.storage_bytes = 0
        self.why = ""
        self._missing: set[int] = set()
        self._lock = threading.Lock()

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        found: list[bytes] = []
        rank = self._rank(key)
        if rank is not None and self._is_given(rank, lambda: self._whole(key, offset, length, found)):
            return found[0] if found else b""
        data = self._storage.read(key, offset, length)
        return data if rank is None else self._counted(data)

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        """As `read`, into `scratch`."""

        def copy(view: memoryview) -> None:
            scratch[:length] = view

        rank = self._rank(key)
        if rank is not None and self._is_given(rank, lambda: self._piece(key, offset, length, copy)):
            return scratch[:length]
        data = self._storage.read_view(key, offset, length, scratch)
        return data if rank is None else self._counted(data)

    def _rank(self, key: str) -> int | None:
        """Whose share the object is in; None for what is read from storage anyhow."""
        writer = keys.writer(key)
        return writer[1] if writer is not None and writer[0] == self._ref else None

    def _whole(self, key: str, offset: int, length: int | None, found: Found) -> None:
        if length is None:
            length = max(0, self._ask(key, 0, 0, lambda view: None) - offset)
        self._piece(key, offset, length, lambda view: found.append(bytes(view)))

    def _piece(self, key: str, offset: int, length: int, use: Use) -> None:
        if length:
            self._ask(key, offset, length, use)
        with self._lock:
            self.num_bytes += length

    def _is_given(self, rank: int, ask: Callable[[], None]) -> bool:
        with self._lock:
            if rank in self._missing:
                return False
        try:
            ask()
        except (OutsideError, PhalanxError) as error:
            with self._lock:
                is_first = rank not in self._missing
                self._missing.add(rank)
                self.why = self.why or f"share of rank {rank}: {error}"
            if is_first:
                LOG.warning("the share of rank %d of %s is read from storage: %s", rank, self._ref, error)
            return False
        return True

    def _counted(self, data: Counted) -> Counted:
        with self._lock:
            self.storage_bytes += len(data)
        return data
