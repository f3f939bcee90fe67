"""The train service as a process, and agents without ranks that speak the real AgentService to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.api.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from phalanx.core.digest import digest_of, sha256
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.lineage.registry import JobName, Registry
from phalanx.objects import open_store
from phalanx.rpc import ClientConfig, Database, Role, Server, ServiceConfig, connect, write_config
from phalanx.rpc.testing import Cluster
from phalanx.train.client import TrainClient, connect_train
from phalanx.train.run import running

DEADLINE_S = 20.0
IDENTITY = sha256(b"identity")
Done = pb.Done()


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """What the condition gives, once it is true."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)
    return found


def tables(storage: str, name: str = "tiny", *, nproc: int = 2, steps: int = 20, **sections: Any) -> dict[str, Any]:
    """A job file that is right."""
    made: dict[str, Any] = {
        "job": {"name": name, "storage": storage},
        "model": {"args": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64}},
        "data": {"train": "file:///data/train"},
        "training": {"steps": steps, "global_batch_size": 8, "seq_len": 32},
        "optimizer": {"lr": 1e-3},
        "parallel": {"local_batch_size": 1},
        "cluster": {"nproc": nproc},
        "deadlines": {"stop_grace_s": 3.0},
    }
    for section, values in sections.items():
        made[section] = made.get(section, {}) | values
    return made


@dataclass
class World:
    """A cluster's files, and its train process."""

    cluster: Cluster
    folder: Path
    config: ServiceConfig
    process: subprocess.Popen[bytes] | None = None
    here: AbstractContextManager[Server] | None = None

    @property
    def storage(self) -> str:
        """Where the registry and all jobs are kept."""
        return self.config.storage

    @property
    def log(self) -> str:
        """What the process printed."""
        return (self.folder / "train.log").read_text()

    def start_here(self) -> None:
        """Starts the service in this process."""
        self.here = running(self.config)
        self.here.__enter__()

    def start(self, *program: str) -> None:
        """Starts a process of its own; returns once it serves."""
        self.spawn(*program)
        self.wait_ready()

    def spawn(self, *program: str) -> None:
        """Starts a process of its own. program: what runs the service."""
        path = self.folder / "train.toml"
        write_config(path, self.config)
        with (self.folder / "train.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(program or ("-m", "phalanx.train")), "--config", str(path)], stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        """Returns once the service answers."""
        with self.client() as client:
            client.wait_ready(DEADLINE_S)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Ends the process by a signal, and waits for it."""
        assert self.process is not None
        os.kill(self.process.pid, signum)
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """Ends what is left."""
        if self.here is not None:
            self.here.__exit__(None, None, None)
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def client(self, role: Role = Role.OPERATOR) -> TrainClient:
        """A client of that role."""
        return connect_train(ClientConfig({"train": self.config.listen}, self.cluster.credentials(role)))

    def lineage(self, name: str = "tiny") -> Lineage:
        """The job's attempts, journal and checkpoints."""
        registered = Registry(open_store(self.storage)).job("default", name)
        assert registered is not None
        return Lineage(registered.store())

    def agent(self, node_id: str = "n1", **settings: Any) -> FakeAgent:
        """An agent that connects; close it."""
        credentials = self.cluster.credentials(Role.AGENT, name=f"agent-{node_id}")
        return FakeAgent(self, connect("train", self.config.listen, credentials), node_id, **settings)


def free_address() -> str:
    """An address of loopback on which nothing listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def make_world(cluster: Cluster, folder: Path, **options: Any) -> World:
    """Files for a cluster below the folder; nothing is started."""
    config = cluster.service(
        "train",
        listen=free_address(),
        storage=f"file://{folder / 'store'}",
        database=Database(f"sqlite:///{folder / 'train.sqlite'}"),
        options={"agent_lost_s": 2.0, **options},
    )
    return World(cluster, folder, config)


@dataclass
class _Gang:
    """What an agent holds of an attempt. step: where it trains."""

    ranks: tuple[int, ...]
    start: pb.StartGang
    step: int = 0


@dataclass
class FakeAgent:
    """An agent without ranks: what they would do, a test does. Like a real one it keeps reports until they are
    acknowledged, answers a known order again, and comes back when its stream breaks.

    refuse: answers to orders by their kind, instead of what is right. mute: ranks that give no stack.
    """

    world: World
    channel: Any
    node_id: str
    slots: int = 2
    instance_id: str = ""
    inventory: Mapping[str, Any] = field(default_factory=dict)
    refuse: dict[str, record_pb2.Cause] = field(default_factory=dict)
    stops_by_itself: bool = True
    mute: frozenset[int] = frozenset()
    orders: list[pb.Order] = field(default_factory=list)
    gangs: dict[tuple[str, int], _Gang] = field(default_factory=dict)
    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    answers: dict[str, pb.Answer] = field(default_factory=dict)
    num_welcomes: int = 0

    def __post_init__(self) -> None:
        self.instance_id = self.instance_id or uuid.uuid4().hex
        self._changed = threading.Condition()
        self._reports: deque[pb.Report] = deque()
        self._number = 0
        self._session: deque[pb.ConnectRequest] | None = None
        self._stopped = threading.Event()
        self._stream: Any = None
        self.connect_allowed = threading.Event()
        self.connect_allowed.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.num_welcomes, f"the welcome of {self.node_id}")

    # What tests do.

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The agent is gone; so are its ranks."""
        self._stopped.set()
        self.connect_allowed.set()
        if self._stream is not None:
            self._stream.cancel()
        self._thread.join(10.0)
        self.channel.close()

    def disconnect(self) -> None:
        """The network to train is cut; the ranks go on."""
        self.connect_allowed.clear()
        self._stream.cancel()

    def reconnect(self) -> None:
        """The network is back."""
        self.connect_allowed.set()

    def ordered(self, kind: str) -> list[pb.Order]:
        """The orders of a kind that were carried out."""
        return [order for order in list(self.orders) if order.WhichOneof("order") == kind]

    def await_order(self, kind: str, number: int = 1) -> pb.Order:
        """The order of that kind and number."""
        wait_until(lambda: len(self.ordered(kind)) >= number, f"order {kind} {number} for {self.node_id}")
        return self.ordered(kind)[number - 1]

    def gang(self, attempt: int, job: str = "tiny") -> _Gang:
        """What it holds of the attempt, once it does."""
        key = (f"projects/default/jobs/{job}", attempt)
        found: _Gang = wait_until(lambda: self.gangs.get(key), f"attempt {attempt} on {self.node_id}")
        return found

    def train(self, attempt: int, step: int, job: str = "tiny", loss: float = 1.0) -> None:
        """The ranks finish a step."""
        self.gang(attempt, job).step = step
        self.say(attempt, job, progress=record_pb2.Progress(step=step, loss=loss, tokens=256))

    def commit(self, attempt: int, step: int, job: str = "tiny") -> None:
        """The ranks commit a checkpoint after a step."""
        put_checkpoint(self.world.lineage(job), attempt, step)
        self.say(attempt, job, committed=record_pb2.Committed(attempt=attempt, step=step))

    def say(self, attempt: int, job: str = "tiny", **event: Any) -> None:
        """Rank 0 says something."""
        record = record_pb2.Record(rank=0, attempt=attempt, **event)
        self._report(attempt, job, records=pb.Records(records=[record]))

    def end(
        self,
        attempt: int,
        state: pb.GangState.ValueType,
        cause: record_pb2.Cause | None = None,
        job: str = "tiny",
        weight: int = 0,
    ) -> None:
        """The gang is over on this node."""
        key = (f"projects/default/jobs/{job}", attempt)
        gang = self.gangs.pop(key)
        self.ended[key] = state
        ended = pb.GangEnded(state=state, cause=cause, last_step=gang.step, weight=weight)
        self._report(attempt, job, gang_ended=ended)

    def die(self, attempt: int, kind: str = "PROCESS_DEATH", job: str = "tiny", weight: int = 0) -> None:
        """A rank dies, and the gang with it."""
        self.end(attempt, pb.GANG_STATE_FAILED, cause(kind, self.node_id), job, weight)

    # What it does by itself.

    def _report(self, attempt: int, job: str, **what: Any) -> None:
        with self._changed:
            self._number += 1
            name = f"projects/default/jobs/{job}"
            report = pb.Report(number=self._number, job=name, attempt=attempt, **what)
            self._reports.append(report)
            if self._session is not None:
                self._session.append(pb.ConnectRequest(report=report))
            self._changed.notify_all()

    @property
    def is_all_acknowledged(self) -> bool:
        """Whether train has all that was told."""
        return not self._reports

    def _run(self) -> None:
        stub = AgentServiceStub(self.channel)
        while not self._stopped.is_set():
            if not self.connect_allowed.wait(0.1):
                continue
            session: deque[pb.ConnectRequest] = deque()
            try:
                self._stream = stub.Connect(self._requests(session))
                for response in self._stream:
                    self._take(session, response)
            except OutsideError:
                pass
            finally:
                with self._changed:
                    self._session = None
                    self._changed.notify_all()
            self._stopped.wait(0.05)

    def _requests(self, session: deque[pb.ConnectRequest]) -> Iterator[pb.ConnectRequest]:
        running = [
            pb.HeldGang(job=job, attempt=attempt, ranks=gang.ranks, state=pb.GANG_STATE_RUNNING)
            for (job, attempt), gang in self.gangs.items()
        ]
        over = [
            pb.HeldGang(job=job, attempt=attempt, state=state)  # type: ignore[arg-type]
            for (job, attempt), state in self.ended.items()
        ]
        inventory = pb.Inventory(host=self.node_id, address="127.0.0.1", num_slots=self.slots, **self.inventory)
        yield pb.ConnectRequest(
            hello=pb.Hello(
                node_id=self.node_id, instance_id=self.instance_id, inventory=inventory, gangs=[*running, *over]
            )
        )
        stream = self._stream
        while not self._stopped.is_set() and self._stream is stream:
            with self._changed:
                if not session:
                    self._changed.wait(0.2)
                request = session.popleft() if session else None
            yield request or pb.ConnectRequest(heartbeat=pb.Heartbeat())

    def _take(self, session: deque[pb.ConnectRequest], response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "welcome":
                with self._changed:
                    session.extend(pb.ConnectRequest(report=report) for report in self._reports)
                    self._session = session
                    self.num_welcomes += 1
                    self._changed.notify_all()
            case "acknowledgement":
                with self._changed:
                    while self._reports and self._reports[0].number <= response.acknowledgement.number:
                        freed = self._reports.popleft()
                        if freed.WhichOneof("report") == "gang_ended":
                            self.ended.pop((freed.job, freed.attempt), None)
            case "order":
                self._carry_out(session, response.order)

    def _carry_out(self, session: deque[pb.ConnectRequest], order: pb.Order) -> None:
        kind = order.WhichOneof("order") or ""
        if order.id not in self.answers:
            self.orders.append(order)
            if kind in self.refuse:
                answer = pb.Answer(order_id=order.id, failure=pb.Failure(cause=self.refuse[kind]))
            else:
                answer = pb.Answer(order_id=order.id, **getattr(self, f"_{kind}")(order))
            self.answers[order.id] = answer
        with self._changed:
            session.append(pb.ConnectRequest(answer=self.answers[order.id]))
            self._changed.notify_all()

    def _prepare(self, order: pb.Order) -> dict[str, Any]:
        spec = json.loads(order.prepare.spec_json)
        prepared = pb.Prepared(
            arguments_json=json.dumps({"job": spec}),
            identity_digest=IDENTITY,
            code_digest=sha256(b"code"),
            placement_json=json.dumps({"world_size": order.prepare.world_size}),
        )
        return {"prepared": prepared}

    def _start_gang(self, order: pb.Order) -> dict[str, Any]:
        start = order.start_gang
        self.gangs[order.job, order.attempt] = _Gang(tuple(start.ranks), start, start.parent_step)
        if 0 in start.ranks:
            name = JobName.parse(order.job)
            self.say(order.attempt, name.uid, opened=record_pb2.Opened(step=start.parent_step))
        started = pb.GangStarted(rendezvous=start.rendezvous or "127.0.0.1:7", pids=[1] * len(start.ranks))
        return {"gang_started": started}

    def _end_gang(self, order: pb.Order) -> dict[str, Any]:
        if (order.job, order.attempt) in self.gangs:
            kind = "SUPERSEDED" if order.end_gang.superseded else "INTERRUPTED"
            job = JobName.parse(order.job).uid
            self.end(order.attempt, pb.GANG_STATE_STOPPED, cause(kind, self.node_id), job, weight=2)
        return {"done": Done}

    def _give_orders(self, order: pb.Order) -> dict[str, Any]:
        gang = self.gangs.get((order.job, order.attempt))
        job = JobName.parse(order.job).uid
        if gang is not None and order.give_orders.checkpoint:
            self.commit(order.attempt, gang.step, job)
        if gang is not None and order.give_orders.stop and self.stops_by_itself:
            if gang.step > gang.start.parent_step:
                self.commit(order.attempt, gang.step, job)
            self.end(order.attempt, pb.GANG_STATE_STOPPED, job=job)
        return {"done": Done}

    def _take_stacks(self, order: pb.Order) -> dict[str, Any]:
        gang = self.gangs[order.job, order.attempt]
        wanted = set(order.take_stacks.ranks or gang.ranks) & set(gang.ranks) - self.mute
        return {"stacks": pb.Stacks(stacks={rank: f"stack of rank {rank}" for rank in wanted})}

    def _read_log(self, order: pb.Order) -> dict[str, Any]:
        text = f"attempt {order.attempt} rank {order.read_log.rank}\n".encode()
        offset = order.read_log.offset if order.read_log.offset >= 0 else max(0, len(text) + order.read_log.offset)
        is_over = (order.job, order.attempt) not in self.gangs
        return {"log_chunk": pb.LogChunk(data=text[offset:], offset=min(offset, len(text)), complete=is_over)}

    def _release_job(self, order: pb.Order) -> dict[str, Any]:
        return {"done": Done}


def cause(kind: str, node_id: str = "", message: str = "by the test") -> record_pb2.Cause:
    """A cause as an agent tells it."""
    number = record_pb2.CauseKind.Value(f"CAUSE_KIND_{kind}")
    return record_pb2.Cause(kind=number, rank=0, message=message, node_id=node_id)


def put_checkpoint(lineage: Lineage, attempt: int, step: int) -> None:
    """Makes a checkpoint exist that holds nothing."""
    lineage.commit(
        Manifest(
            attempt=attempt,
            step=step,
            world_size=2,
            identity_digest=IDENTITY,
            placement_digest=digest_of({}),
            code_digest=sha256(b"code"),
            journal_digest=digest_of({}),
            loader=LoaderState(step, step * 8),
            schedule={},
            records=(),
            parts=(),
        )
    )


def ref(attempt: int, step: int) -> CheckpointRef:
    """A checkpoint's name."""
    return CheckpointRef(attempt, step)
