"""Reads stored boxes and verifies every chunk before anybody sees its bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash

from phalanx.core.box import Box, whole
from phalanx.objects import ObjectMissing, ObjectStore, StoreError
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.index import NUM_READERS, Index, StoredTensor
from phalanx.snapshot.parts import StoredBox, StoredObject
from phalanx.snapshot.plan import Read, chunk_runs, coalesced, needed_chunks


def _nowhere() -> None:
    """Who needs the values has no memory for the whole box in its own order of bytes."""


def _unheard(values: np.ndarray) -> None:
    """Who needs the values has them already."""


@dataclass(slots=True)
class Wanted:
    """A stored box, and the boxes inside it (global indices) that somebody needs.

    deliver: called once, with the verified values: an array of the stored box's shape whose elements in `boxes` are
    valid. into: called once before it; where it gives memory, uint8 [bytes of the stored box], verified bytes go
    straight there, and that is what `deliver` gets. take: where it is given, neither is called: it gets every verified
    piece, in any order and from several threads, with the piece's first byte in the stored box; the bytes are gone when
    it returns.
    """

    stored: StoredBox
    boxes: Sequence[Box]
    deliver: Callable[[np.ndarray], None] = _unheard
    into: Callable[[], np.ndarray | None] = _nowhere
    take: Callable[[int, memoryview], None] | None = None


@dataclass(slots=True)
class Landing:
    """Memory in which a stored box arrives, read by read; untouched pages of what is not needed cost nothing."""

    wanted: Wanted
    reads_left: int
    memory: np.ndarray | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def fetch(
    store: ObjectStore, objects: Mapping[str, StoredObject], wanted: Sequence[Wanted], num_readers: int = NUM_READERS
) -> int:
    """Reads and verifies what `wanted` needs in `num_readers` threads, delivering each box when it is complete. Returns
    bytes read.

    Raises DamagedCheckpoint at the first wrong chunk; whatever was put anywhere until then was verified.
    """
    landings: dict[int, Landing] = {}
    runs = []
    for item in wanted:
        found = chunk_runs(item.stored, needed_chunks(item.stored, item.boxes))
        runs += found
        landings[id(item.stored)] = Landing(item, len(found))
    reads = coalesced(runs)
    scratch = Scratch(max((read.stop - read.start for read in reads), default=0))
    with ThreadPoolExecutor(num_readers) as pool:
        tasks = [pool.submit(_fetch_one, store, objects[read.key], read, landings, scratch) for read in reads]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return sum(read.stop - read.start for read in reads)


def read_tensor(store: ObjectStore, index: Index, tensor: StoredTensor) -> np.ndarray:
    """The whole tensor, verified, in its global shape; bfloat16 as its bytes in uint16."""
    values = np.empty(tensor.global_shape, dtype=tensor.kind.storage)
    full = whole(tensor.global_shape)

    def wanted(stored: StoredBox) -> Wanted:
        def deliver(array: np.ndarray) -> None:
            values[full.slices_of(stored.box)] = array

        return Wanted(stored, [stored.box], deliver)

    fetch(store, index.objects, [wanted(stored) for stored in tensor.boxes if stored.box.num_elements > 0])
    return values


class Scratch(threading.local):
    """Memory of each thread that reads one range after the other: fresh memory costs more than the reading. It is the
    system's, not the allocator's, which would keep it for later in every thread's own heap.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: memoryview | None = None

    @property
    def memory(self) -> memoryview:
        """`num_bytes` that are this thread's own, and hold what it read last."""
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, max(1, self._num_bytes), flags=mmap.MAP_PRIVATE))[: self._num_bytes]
        return self._memory


def read_range(
    store: ObjectStore, stored: StoredObject, start: int, stop: int, scratch: Scratch | None = None
) -> memoryview:
    """Bytes [start, stop) of the object's data, in `scratch` where that is given and the store can put them there;
    DamagedCheckpoint where the object is gone or has another size.
    """
    offset, length = stored.data_start + start, stop - start
    try:
        try:
            if scratch is not None:
                return store.read_view(stored.key, offset, length, scratch.memory)
            return memoryview(store.read(stored.key, offset, length))
        except StoreError as error:
            num_bytes = store.info(stored.key).num_bytes
            if num_bytes == stored.num_bytes:
                raise
            raise DamagedCheckpoint(stored.key, f"has {num_bytes} bytes, its part says {stored.num_bytes}") from error
    except ObjectMissing as error:
        raise DamagedCheckpoint(stored.key, "is gone") from error


def verify_chunk(stored: StoredBox, number: int, data: memoryview) -> None:
    """DamagedCheckpoint, naming object, tensor and chunk, unless `data` is what was written as chunk `number` of the
    box.
    """
    if xxhash.xxh3_64_hexdigest(data) != stored.chunks[number]:
        raise DamagedCheckpoint(stored.key, "holds other bytes than were written", tensor=stored.tensor, chunk=number)


def _fetch_one(
    store: ObjectStore, stored_object: StoredObject, read: Read, landings: Mapping[int, Landing], scratch: Scratch
) -> None:
    data = read_range(store, stored_object, read.start, read.stop, scratch)
    for run in read.runs:
        stored, size = run.stored, run.stored.chunk_bytes
        piece = data[run.start - read.start : run.stop - read.start]
        for at in range(run.count):
            verify_chunk(stored, run.first + at, piece[at * size : (at + 1) * size])
        land(landings[id(stored)], run.first * size, piece)


def land(landing: Landing, start: int, piece: memoryview) -> None:
    """Puts verified bytes at `start` of their box; delivers the box with the last of them."""
    stored = landing.wanted.stored
    if landing.wanted.take is not None:
        landing.wanted.take(start, piece)
        return
    with landing.lock:
        if landing.memory is None:
            given = landing.wanted.into()
            landing.memory = np.empty(stored.num_bytes, dtype=np.uint8) if given is None else given
        memory = landing.memory
    memory[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
    with landing.lock:
        landing.reads_left -= 1
        if landing.reads_left:
            return
        landing.memory = None
    landing.wanted.deliver(memory.view(stored.kind.storage).reshape(stored.box.shape))
