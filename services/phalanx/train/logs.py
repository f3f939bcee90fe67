"""What a rank printed, piece by piece, from the agent of its node; over attempts where that is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import OutsideError
from phalanx.lineage.events import EventType, JobState
from phalanx.lineage.registry import JobName
from phalanx.rpc.errors import FailedPrecondition, NotFound
from phalanx.train.book import Book
from phalanx.train.launch.base import GangKey, Launcher, LogChunk, To
from phalanx.train.states import OVER

CHUNK_BYTES: Final = 1 << 20
CHUNK_DEADLINE_S: Final = 10.0
LOOK_S: Final = 0.5
_TOLD: Final = "`phalanx job show` and `phalanx job watch` tell attempts and ranks"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of an attempt's log. next_offset: behind them."""

    data: bytes
    attempt: int
    next_offset: int


class Logs:
    """Reads logs. Every method may raise PhalanxError, and OutsideError where an agent does not answer."""

    def __init__(self, book: Book, launcher: Launcher) -> None:
        self._book, self._launcher = book, launcher

    def read(
        self, name: JobName, rank: int, attempt: int, offset: int, over: threading.Event, *, follow: bool
    ) -> Iterator[LogPiece]:
        """The log from `offset` on (negative: from the end); with `follow` what comes too, over attempts, until the job
        ends or `over`.
        """
        attempt = attempt or self._book.job(name).attempt
        while attempt == 0 and follow and not over.is_set():
            over.wait(LOOK_S)
            attempt = self._book.job(name).attempt
        while not over.is_set():
            yield from self._of_attempt(name, rank, attempt, offset, over, follow=follow)
            newest = self._awaited(name, attempt, over) if follow else attempt
            if newest == attempt:
                return
            attempt, offset = attempt + 1, 0

    def _awaited(self, name: JobName, attempt: int, over: threading.Event) -> int:
        """The newest attempt, once there is a newer one or none will come."""
        while not over.is_set():
            job = self._book.job(name)
            if job.attempt > attempt or job.state in OVER or job.state is JobState.SUSPENDED:
                return job.attempt
            over.wait(LOOK_S)
        return attempt

    def _of_attempt(
        self, name: JobName, rank: int, attempt: int, offset: int, over: threading.Event, *, follow: bool
    ) -> Iterator[LogPiece]:
        node_id = self._node_of(name, rank, attempt)
        while not over.is_set():
            chunk = self._chunk(name, rank, attempt, node_id, offset, follow=follow)
            if chunk is not None and chunk.data:
                offset = chunk.offset + len(chunk.data)
                yield LogPiece(chunk.data, attempt, offset)
            is_at_end = chunk is not None and not chunk.data
            if chunk is not None and (chunk.complete or (is_at_end and self._is_enough(name, attempt, follow=follow))):
                return
            if chunk is None or is_at_end:
                over.wait(LOOK_S)

    def _is_enough(self, name: JobName, attempt: int, *, follow: bool) -> bool:
        job = self._book.job(name)
        return not follow or not (job.is_live and job.attempt == attempt)

    def _chunk(
        self, name: JobName, rank: int, attempt: int, node_id: str, offset: int, *, follow: bool
    ) -> LogChunk | None:
        """A piece; None where the agent is away and `follow` waits for it."""
        node = next((each for each in self._launcher.nodes() if each.node_id == node_id), None)
        if node is not None and node.is_connected:
            to, key = To(node.node_id, node.instance_id), GangKey(str(name), attempt)
            return self._launcher.read_log(to, key, rank, offset, CHUNK_BYTES, CHUNK_DEADLINE_S)
        if follow and not self._is_enough(name, attempt, follow=True):
            return None
        raise OutsideError(f"the log of rank {rank} lies on node {node_id}, whose agent is not connected")

    def _node_of(self, name: JobName, rank: int, attempt: int) -> str:
        if attempt == 0:
            raise FailedPrecondition(
                str(name), value="no attempt yet", expected="a job that has started", remedy="wait, or follow the log"
            )
        placements = {
            event.attempt: event.placement
            for event in self._book.events(name, 0)
            if event.type is EventType.STARTING and event.attempt
        }
        if attempt not in placements:
            started = f"at most {max(placements)}, the newest" if placements else "none: nothing has started"
            raise NotFound("attempt", value=attempt, expected=f"an attempt of {name} ({started})", remedy=_TOLD)
        for assignment in placements[attempt]:
            if rank in assignment.ranks:
                return assignment.node_id
        last = max((number for each in placements[attempt] for number in each.ranks), default=0)
        expected = f"a rank of attempt {attempt} of {name} (from 0 to {last})"
        raise NotFound("rank", value=rank, expected=expected, remedy=_TOLD)
