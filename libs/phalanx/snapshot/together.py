"""Reads a checkpoint as a group of ranks: each reads its share (`sharing`), verifies it, and hands it to those of its
peers that need it too; they verify again what came over the network.

A rank reads ahead of what it hands on. One that fails raises, and its process ends; its peers then meet a connection
that is closed, or the deadline of their group, and raise OutsideError: nobody waits for ever, nobody goes on alone.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from phalanx.core.box import Box
from phalanx.core.digest import canonical_json
from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectStore
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.fetch import Landing, Wanted, land, read_range, verify_chunk
from phalanx.snapshot.index import NUM_READERS, Index
from phalanx.snapshot.parts import StoredBox
from phalanx.snapshot.peers import Peers
from phalanx.snapshot.plan import ChunkRun, Read, coalesced
from phalanx.snapshot.sharing import SharedRun, first_bytes, shared_runs

AHEAD_BYTES = 128 << 20
Needs = Mapping[str, Sequence[Box]]


def fetch_together(
    store: ObjectStore, index: Index, wanted: Sequence[Wanted], needs: Needs, peers: Peers
) -> tuple[int, int]:
    """Delivers `wanted` as `fetch` does. Returns the bytes that this rank read, and those that it received.

    needs: this rank's boxes by tensor; all of the group call this together, each with its own. Raises DamagedCheckpoint
    where a chunk that this rank read is wrong, OutsideError where a peer is gone or late.
    """
    everyone = [_decoded(data) for data in peers.gather(_encoded(needs))]
    shared = plan(index, [item.stored for item in wanted], everyone, peers.rank)
    landings = {id(item.stored): Landing(item, 0) for item in wanted}
    for item in shared:
        landings[id(item.run.stored)].reads_left += 1
    turns = [list(group) for _, group in itertools.groupby(shared, key=lambda item: item.turn)]
    read_bytes = received_bytes = 0
    with ThreadPoolExecutor(NUM_READERS) as pool:
        try:
            for turn, own in _reading(store, index, turns, peers.rank, pool):
                pieces = {number: piece for task in own for number, piece in task.result().items()}
                read_bytes += sum(read.stop - read.start for read in _reads(turn, peers.rank))
                received = _received(turn, pieces, peers)
                received_bytes += sum(map(len, received.values()))
                for number, item in enumerate(turn):
                    piece = pieces[number] if item.reader == peers.rank else received[number]
                    start = item.run.first * item.run.stored.chunk_bytes
                    land(landings[id(item.run.stored)], start, piece)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return read_bytes, received_bytes


def plan(index: Index, stored: Sequence[StoredBox], everyone: Sequence[Needs], rank: int) -> list[SharedRun]:
    """What `rank` reads or receives of these boxes, in the order in which it changes hands."""
    starts = first_bytes({name: (tensor.dtype, tensor.global_shape) for name, tensor in index.tensors.items()})
    found: list[SharedRun] = []
    for box in stored:
        inside = {member: _inside(box, needs.get(box.tensor, ())) for member, needs in enumerate(everyone)}
        needed = {member: boxes for member, boxes in inside.items() if boxes}
        found += [item for item in shared_runs(box, needed, starts[box.tensor]) if rank in item.takers]
    return sorted(found, key=_order)


def _order(item: SharedRun) -> tuple[int, str, str, int]:
    return item.turn, item.run.stored.tensor, item.run.stored.key, item.run.start


def _inside(stored: StoredBox, boxes: Sequence[Box]) -> list[Box]:
    found = (box.intersect(stored.box) for box in boxes if box.num_elements)
    return [common for common in found if common is not None]


def _reads(turn: Sequence[SharedRun], rank: int) -> list[Read]:
    return coalesced(item.run for item in turn if item.reader == rank)


Pieces = dict[int, memoryview]


def _reading(
    store: ObjectStore, index: Index, turns: Sequence[list[SharedRun]], rank: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[SharedRun], list[Future[Pieces]]]]:
    """Each turn with its reads on their way, and those of the next turns behind them as far as memory allows."""
    queued: deque[tuple[list[SharedRun], list[Future[Pieces]], int]] = deque()
    rest, ahead_bytes = iter(turns), 0
    while True:
        while ahead_bytes < AHEAD_BYTES and (turn := next(rest, None)) is not None:
            numbers = {id(item.run): number for number, item in enumerate(turn)}
            reads = _reads(turn, rank)
            tasks = [pool.submit(_read, store, index, read, numbers) for read in reads]
            num_bytes = sum(read.stop - read.start for read in reads)
            queued.append((turn, tasks, num_bytes))
            ahead_bytes += num_bytes
        if not queued:
            return
        turn, tasks, num_bytes = queued.popleft()
        yield turn, tasks
        ahead_bytes -= num_bytes


def _read(store: ObjectStore, index: Index, read: Read, numbers: Mapping[int, int]) -> Pieces:
    """Verified bytes of each run of the read, by the run's number in its turn."""
    data = read_range(store, index.objects[read.key], read.start, read.stop)
    pieces: Pieces = {}
    for run in read.runs:
        piece = pieces[numbers[id(run)]] = data[run.start - read.start : run.stop - read.start]
        _verify(run, piece)
    return pieces


def _verify(run: ChunkRun, piece: memoryview) -> None:
    size = run.stored.chunk_bytes
    for at in range(run.count):
        verify_chunk(run.stored, run.first + at, piece[at * size : (at + 1) * size])


def _received(turn: Sequence[SharedRun], pieces: Pieces, peers: Peers) -> Pieces:
    """Hands on what this rank read of the turn, and takes the rest from those who read it."""
    outgoing: dict[int, np.ndarray] = {}
    joined: dict[tuple[int, ...], np.ndarray] = {}
    incoming: dict[int, int] = {}
    for member in sorted({member for item in turn for member in item.takers} - {peers.rank}):
        given = tuple(n for n, item in enumerate(turn) if item.reader == peers.rank and member in item.takers)
        if given and given not in joined:
            joined[given] = np.concatenate([np.frombuffer(pieces[number], dtype=np.uint8) for number in given])
        if given:
            outgoing[member] = joined[given]
        taken = sum(item.num_bytes for item in turn if item.reader == member)
        if taken:
            incoming[member] = taken
    found: Pieces = {}
    for member, rows in peers.swap(outgoing, incoming).items():
        data, at = rows.data, 0
        for number, item in enumerate(turn):
            if item.reader == member:
                found[number] = data[at : at + item.num_bytes]
                at += item.num_bytes
                _verify_received(item, found[number], member)
    return found


def _verify_received(item: SharedRun, piece: memoryview, member: int) -> None:
    try:
        _verify(item.run, piece)
    except DamagedCheckpoint as error:
        tensor = item.run.stored.tensor
        raise OutsideError(f"bytes of {tensor} changed on their way from member {member}, who verified them") from error


def _encoded(needs: Needs) -> bytes:
    return canonical_json({name: [[box.offset, box.shape] for box in boxes] for name, boxes in needs.items()})


def _decoded(data: bytes) -> Needs:
    boxes = json.loads(data)
    return {name: [Box(tuple(offset), tuple(shape)) for offset, shape in rows] for name, rows in boxes.items()}
