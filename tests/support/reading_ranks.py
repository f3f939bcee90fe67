"""Ranks that read and record as training ones do, without a model, each a process of its own; and the gang of them.

A rank is `python -m support.reading_ranks JOB.json ATTEMPT RANK WORLD FIRST LAST EVERY`: it prints `step N` after each
step that it read, and `saved N REF` once its records up to N are stored.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import digest_of, sha256
from phalanx.lineage import Lineage, LoaderState, Manifest, WindowRows, journal_digest
from phalanx.lineage.values import ObjectRef
from phalanx.spec import Job, parse_job
from phalanx.stream.batch import slots
from phalanx.stream.view import View
from phalanx.stream.windows import MixtureReader
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.places import job_store

TESTS = Path(__file__).parent.parent
DIGEST = sha256(b"a reading rank")


def run_rank(job: Job, attempt: int, rank: int, world: int, first: int, last: int, every: int) -> None:
    """Reads the steps first .. last, and stores what was read every few of them."""
    lineage, reading = Lineage(job_store(job)), JobReading.of(job, None)
    with opened(job, reading) as reader:
        rows: list[WindowRows] = []
        begun = first
        for step in range(first, last + 1):
            read = reader.read(positions_of(job, step, world, rank)).rows
            columns = {name: getattr(read, name) for name in type(read).__dataclass_fields__}
            rows.append(WindowRows(step=np.full(len(read.position), step), **columns))
            say(f"step {step}")
            if step % every == 0 or step == last:
                ref = lineage.records.put(attempt, rank, begun, step, WindowRows.concatenate(rows), None)
                say(f"saved {step} {json.dumps(asdict(ref))}")
                rows, begun = [], step + 1


def opened(job: Job, reading: JobReading) -> MixtureReader:
    """A reader of the job's training windows, as `trainer.session` opens it."""
    return MixtureReader(reading.sources, View(reading.mixture()), job.data.document_mask, reads_ahead=True)


def positions_of(job: Job, step: int, world: int, rank: int) -> NDArray[np.int64]:
    """Windows of a step that a rank reads, in its order."""
    batch = job.training.global_batch_size
    return slots((step - 1) * batch, batch, world, job.parallel.local_batch_size, rank).reshape(-1)


def say(text: str) -> None:
    """One line to the gang, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass
class Rank:
    """A rank as its gang sees it: the last step that it read, and its records by the step up to which they go."""

    process: subprocess.Popen[bytes]
    read: int = 0
    saved: dict[int, ObjectRef] = field(default_factory=dict)
    rest: bytes = b""
    is_over: bool = False

    def listen(self) -> None:
        """Takes in what the rank has said; an assertion where it has failed."""
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        if not chunk:
            code, self.is_over = self.process.wait(), True
            assert code == 0, f"a rank ended with {code} after step {self.read}"
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            what, step, *ref = line.split(maxsplit=2)
            if what == b"saved":
                self.saved[int(step)] = ObjectRef(**json.loads(ref[0]))
            else:
                self.read = int(step)

    def end(self) -> None:
        """Kills and reaps it."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class ReadingGang:
    """Attempts of a job, read by any number of ranks; a checkpoint is committed once all of them have saved.

    file: the job as JSON. every: steps between checkpoints. step: of the newest one.
    """

    job: Job
    file: Path
    every: int
    deadline_s: float
    kills: int = 0
    step: int = 0

    def run(self, world: int, last: int, kill_at: int | None = None, victim: int = 0) -> None:
        """A new attempt of `world` ranks from the newest checkpoint to step `last`; kill_at: step after which `victim`
        gets SIGKILL, and then all others too, as a gang ends.
        """
        lineage, first = Lineage(job_store(self.job)), self.step + 1
        attempt = lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={"world": world}).number
        ranks = [Rank(self._start(attempt, rank, world, first, last)) for rank in range(world)]
        ends_s = time.monotonic() + self.deadline_s
        try:
            while self.step < last and not (kill_at is not None and ranks[victim].read >= kill_at):
                assert time.monotonic() < ends_s, f"the ranks stood at {[rank.read for rank in ranks]} of {last}"
                for rank in readable(ranks):
                    rank.listen()
                self._commit(lineage, attempt, ranks, last)
            if self.step < last:
                os.kill(ranks[victim].process.pid, signal.SIGKILL)
                self.kills += 1
        finally:
            for rank in ranks:
                rank.end()

    def _start(self, *numbers: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "support.reading_ranks", str(self.file), *map(str, [*numbers, self.every])]
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    def _commit(self, lineage: Lineage, attempt: int, ranks: list[Rank], last: int) -> None:
        """Commits each step that all ranks have saved."""
        while self.step < last:
            step = min(last, (self.step // self.every + 1) * self.every)
            if not all(step in rank.saved for rank in ranks):
                return
            loader = LoaderState(step, step * self.job.training.global_batch_size)
            digests = (DIGEST, digest_of({}), DIGEST, journal_digest(()))
            refs = tuple(rank.saved[step] for rank in ranks)
            lineage.commit(Manifest(attempt, step, len(ranks), *digests, loader, {}, refs, ()))
            self.step = step


def readable(ranks: list[Rank]) -> list[Rank]:
    """Those that have said something, waited for a second at most."""
    ready = select.select([rank.process.stdout for rank in ranks if not rank.is_over], [], [], 1.0)[0]
    return [rank for rank in ranks if rank.process.stdout in ready]


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    run_rank(parse_job(json.loads(Path(path).read_text())), *map(int, numbers))
