"""Tiny corpora, job files and runs, for tests that need the whole of Phalanx: through the command line, or in this
process from one fork server.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.job_proof import prove_job
from phalanx.data.proof import Proof
from phalanx.gang import Event, ForkServer, Gang, GangOutcome
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.snapshot import load
from phalanx.spec import Job, load_job
from phalanx.trainer.local import run_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import prepare
from phalanx.trainer.tally import Tally

PHALANX = Path(sys.executable).with_name("phalanx")
USER_MODELS = Path(__file__).parents[1] / "e2e"
MARKER = "PHALANX_TEST_PROCESS"
TIMEOUT_S = 90.0
PREPARE = ("--vocab-size", "300", "--held-out-fraction", "0.1", "--shard-tokens", "4096")
WORDS = "the line holds when one falls next steps forward and all move as many ranks of a phalanx".split()  # noqa: SIM905

JOB = """\
[job]
name = "tiny"
storage = "{folder}/store"
[model]
preset = "tiny"
[data]
train = "{data}/train"
held_out = "{data}/held_out"
[training]
seq_len = 32
steps = {steps}
global_batch_size = 8
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
total_steps = 40
[parallel]
local_batch_size = 4
[checkpoint]
interval = 2
[metrics]
folder = "{metrics}"
[cluster]
nproc = {nproc}
"""


def write_corpus(folder: Path, num_documents: int = 60, seed: int = 1) -> Path:
    """A folder of texts of uneven length, all different, the same for one seed: about 230 tokens each."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    for number in range(num_documents):
        words = (draw.choice(WORDS) for _ in range(draw.randint(20, 400)))
        (folder / f"document-{number}.txt").write_text(f"{number} {' '.join(words)}")
    return folder


def write_job(folder: Path, data: str, *, steps: int = 6, nproc: int = 2, more: str = "") -> Path:
    """A job file of the tiny model with its store, metrics and logs below `folder`. data: URL of a prepared corpus.
    more: TOML after it.
    """
    path = folder / "job.toml"
    path.write_text(
        JOB.format(folder=folder.as_uri(), data=data, steps=steps, nproc=nproc, metrics=folder / "metrics") + more
    )
    return path


def user_job(folder: Path, data: str, class_: str, *, once: bool = False, more: str = "", **args: int) -> Path:
    """A job of one of the tests' own models on two ranks, six steps, one forward a step and rank."""
    path = write_job(folder, data, steps=6)
    given = {"vocab_size": 300, **args, **({"once": str(folder / "happened")} if once else {})}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    model = f'class = "user_models:{class_}"\n[model.args]\n{lines}'
    path.write_text(path.read_text().replace('preset = "tiny"', model) + more)
    return path


# Through the command line.


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. code: negative for a signal."""

    code: int
    out: str
    err: str


class Command:
    """A program and whatever it starts, found again by a variable in its environment. Leaving the context kills all."""

    def __init__(
        self, arguments: Sequence[str | Path], environ: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(USER_MODELS), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "400", MARKER: self.mark}
        self.process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **own, **(environ or {})},
            start_new_session=True,
            text=True,
        )
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._changed = threading.Condition()
        streams = (("out", self.process.stdout), ("err", self.process.stderr))
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        for line in stream:
            with self._changed:
                self._lines[name].append(line)
                self._changed.notify_all()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, *self.alive()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(10)

    @property
    def err(self) -> str:
        """What it wrote to stderr so far."""
        with self._changed:
            return "".join(self._lines["err"])

    def lines(self, stream: str) -> list[str]:
        """What it wrote to `out` or `err` so far."""
        with self._changed:
            return list(self._lines[stream])

    def wait_for(self, text: str, deadline_s: float = TIMEOUT_S, stream: str = "err") -> None:
        """Returns once a line with `text` is on stderr (or stdout: `out`)."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while not any(text in line for line in self._lines[stream]):
                left_s = end_s - time.monotonic()
                ended = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
                assert left_s > 0 and not ended, f"no {text!r} in:\n{''.join(self._lines[stream])}"
                self._changed.wait(min(left_s, 0.2))

    def type(self, text: str) -> None:
        """Writes to its standard input, which must be a pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def signal(self, signum: int) -> None:
        """To the first process alone; nothing happens where it has ended."""
        self.process.send_signal(signum)

    def finish(self, deadline_s: float = TIMEOUT_S) -> Finished:
        """Waits for the end of the first process."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {deadline_s:g} s:\n{self.err}") from None
        for reader in self._readers:
            reader.join(10)
        return Finished(code, "".join(self._lines["out"]), self.err)

    def alive(self) -> tuple[int, ...]:
        """The living processes that it started, itself included; the dead that nobody has reaped don't count."""
        return tuple(pid for pid in _pids() if _holds(pid, f"{MARKER}={self.mark}".encode()))

    def ranks(self) -> tuple[int, ...]:
        """Its living ranks, in the order of their numbers: the children of the fork server, as they were forked."""
        alive = self.alive()
        servers = {pid for pid in alive if _is_fork_server(pid) and _parent_of(pid) == self.process.pid}
        return tuple(sorted(pid for pid in alive if _parent_of(pid) in servers))

    def wait_until_nothing_lives(self, deadline_s: float = 10.0) -> None:
        """Returns once no process of it lives."""
        wait_until(lambda: not self.alive(), deadline_s, "processes are left")


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _holds(pid: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _is_fork_server(pid: int) -> bool:
    try:
        return b"phalanx.gang.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run_cli(
    arguments: Sequence[str | Path], timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> Finished:
    """`phalanx ARGUMENTS...` to its end; fails where it leaves a process behind."""
    with Command([PHALANX, *arguments], environ) as command:
        finished = command.finish(timeout_s)
        command.wait_until_nothing_lives()
    return finished


def torchrun(path: Path, *overrides: str, nproc: int = 2) -> Command:
    """`torchrun -m phalanx.trainer` on a free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--master-addr=127.0.0.1"]
    chosen = [word for each in overrides for word in ("--set", each)]
    return Command([*launcher, f"--master-port={port}", "-m", "phalanx.trainer", path, *chosen])


def prepared_corpus(folder: Path) -> str:
    """URL of a corpus that `phalanx data prepare` made below `folder`: 14,000 tokens to train on, some held out."""
    url = (folder / "data").as_uri()
    finished = run_cli(["data", "prepare", write_corpus(folder / "text"), "--out", url, *PREPARE])
    assert finished.code == 0, finished.err
    return url


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Returns once `condition` is true; fails with `what` past the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} after {deadline_s:g} s"
        time.sleep(0.01)


# In this process.


@dataclass(slots=True)
class Run:
    """A run in this process as it goes: the gang that lives, all events, their tally."""

    job: Job
    gang: Gang | None = None
    outcome: GangOutcome | None = None
    events: list[Event] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]


def run_here(
    path: Path, server: ForkServer, *overrides: str, on_event: Callable[[Run, Event], None] = lambda run, event: None
) -> Run:
    """What `phalanx run` does, with the ranks of `server`. on_event: called after the run took the event in."""
    job = load_job(path, overrides)
    run = Run(job)

    def observe(event: Event) -> None:
        run.events.append(event)
        run.tally.observe(event)
        on_event(run, event)

    def start(gang: Gang) -> None:
        run.gang = gang

    run.outcome = run_job(prepare(job, job.cluster.world_size), server, observe, on_start=start)
    return run


@contextmanager
def user_model_path() -> Iterator[dict[str, str]]:
    """The environment in which ranks find the tests' own models; this process finds them too."""
    sys.path.insert(0, str(USER_MODELS))
    try:
        inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        yield {"PYTHONPATH": os.pathsep.join([str(USER_MODELS), *inherited])}
    finally:
        sys.path.remove(str(USER_MODELS))


# What is in storage.


def lineage_of(path: Path, *overrides: str) -> Lineage:
    """The lineage of a job file's job."""
    return Lineage(job_store(load_job(path, overrides)))


def proof_of(path: Path, *overrides: str) -> Proof:
    """The proof of a job file's job."""
    return prove_job(load_job(path, overrides))


def assert_proven(path: Path, steps: int, *overrides: str) -> Proof:
    """Every window of `steps` steps was trained on exactly once, and with the bytes that the shards hold."""
    proof = proof_of(path, *overrides)
    assert proof.ok and proof.steps == steps and proof.bytes_compared > 0, proof
    return proof


def job_folder(path: Path) -> Path:
    """Where the objects of a job file's job lie."""
    return path.parent / "store" / "projects" / "default" / "jobs" / load_job(path).job.name


def newest_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of the newest live checkpoint, verified while they are read."""
    return load(job_folder(path).as_uri())


def losses_of(path: Path, *overrides: str) -> dict[int, float]:
    """The loss of each step on the live chain."""
    rows = (steps for _, steps in lineage_of(path, *overrides).records.live())
    return {int(step): float(loss) for each in rows for step, loss in zip(each.step, each.loss, strict=True)}


def every_manifest_holds(path: Path) -> list[CheckpointRef]:
    """Reads every manifest there is, live or not, as it says itself; and the newest live checkpoint, whole."""
    lineage = lineage_of(path)
    found = sorted(job_folder(path).glob("a*/s*/manifest.json"))
    refs = [CheckpointRef(int(each.parts[-3][1:]), int(each.parts[-2][1:])) for each in found]
    for ref in refs:
        assert lineage.manifest(ref).ref == ref
    if lineage.checkpoints():
        assert newest_tensors(path)
    return refs
