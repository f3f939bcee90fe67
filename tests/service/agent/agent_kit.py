"""A small train, data and checkpoint service for the agent's tests, over real gRPC with mTLS, and agents to talk to."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1.agent_service_pb2_grpc import AgentServiceServicer, add_AgentServiceServicer_to_server
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import (
    CheckpointServiceServicer,
    add_CheckpointServiceServicer_to_server,
)
from phalanx.api.data.v1 import data_service_pb2 as data_pb
from phalanx.api.data.v1.data_service_pb2_grpc import DataServiceServicer, add_DataServiceServicer_to_server
from phalanx.lineage import journal_digest
from phalanx.rpc.config import Security, ServiceConfig, write_config
from phalanx.rpc.errors import Superseded
from phalanx.rpc.handlers import caller, ended
from phalanx.rpc.server import Server, serve
from phalanx.rpc.testing import Cluster
from phalanx.rpc.tokens import AGENTS, Role
from phalanx.trainer.code import code_digest

HERE = Path(__file__).parent
JOB = "projects/default/jobs/tiny"
ENTRY = "agent_ranks:run"


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> float:
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start_s


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Train(AgentServiceServicer):
    """Remembers all that agents say; acknowledges as it is told to."""

    acknowledges: bool = True
    hellos: list[pb.Hello] = field(default_factory=list)
    heartbeats: list[pb.Heartbeat] = field(default_factory=list)
    reports: list[pb.Report] = field(default_factory=list)
    unique: dict[tuple[str, int], pb.Report] = field(default_factory=dict)
    answers: list[pb.Answer] = field(default_factory=list)
    contexts: list[grpc.ServicerContext] = field(default_factory=list)
    streams: dict[str, grpc.ServicerContext] = field(default_factory=dict)
    orders: dict[str, queue.Queue[pb.Order]] = field(default_factory=lambda: defaultdict(queue.Queue))

    def Connect(self, requests: Iterator[pb.ConnectRequest], context: grpc.ServicerContext):  # noqa: N802
        caller(context)
        self.contexts.append(context)
        over, outgoing = ended(context), queue.Queue()
        hello = next(requests)
        assert hello.WhichOneof("message") == "hello"
        node = hello.hello.node_id
        self.streams[node] = context
        self.hellos.append(hello.hello)
        threading.Thread(target=self._listen, args=(node, requests, outgoing), daemon=True).start()
        yield pb.ConnectResponse(welcome=pb.Welcome(lost_after=Duration(seconds=150)))
        while not over.is_set():
            with contextlib.suppress(queue.Empty):
                yield outgoing.get(timeout=0.01)
            if context is not self.streams[node]:
                return
            with contextlib.suppress(queue.Empty):
                yield pb.ConnectResponse(order=self.orders[node].get_nowait())

    def _listen(self, node: str, requests: Iterator[pb.ConnectRequest], outgoing: queue.Queue) -> None:
        try:
            for request in requests:
                match request.WhichOneof("message"):
                    case "heartbeat":
                        self.heartbeats.append(request.heartbeat)
                    case "answer":
                        self.answers.append(request.answer)
                    case "report":
                        self.reports.append(request.report)
                        self.unique[node, request.report.number] = request.report
                        if self.acknowledges:
                            number = request.report.number
                            outgoing.put(pb.ConnectResponse(acknowledgement=pb.Acknowledgement(number=number)))
        except (grpc.RpcError, Exception):  # noqa: BLE001 - the stream is over
            return

    def send(
        self, attempt: int = 1, order_id: str = "", deadline_s: float = 60.0, job: str = JOB, node: str = "", **order
    ) -> str:
        """To a node, or to the one that came last; the order's id."""
        order_id = order_id or uuid.uuid4().hex
        self.orders[node or self.hellos[-1].node_id].put(
            pb.Order(id=order_id, job=job, attempt=attempt, deadline=_duration(deadline_s), **order)
        )
        return order_id

    def ask(self, *, within_s: float = 60.0, **order) -> pb.Answer:
        order_id = self.send(**order)
        return self.answer_of(order_id, within_s)

    def answer_of(self, order_id: str, within_s: float = 60.0) -> pb.Answer:
        wait_until(lambda: any(each.order_id == order_id for each in self.answers), within_s, f"answer to {order_id}")
        return next(each for each in self.answers if each.order_id == order_id)

    def drop_stream(self) -> None:
        self.contexts[-1].cancel()

    def records(self, kind: str, attempt: int = 1) -> list:
        """The events of that kind, once each, in the order of the reports' numbers."""
        return [
            getattr(record, kind)
            for _, report in sorted(self.unique.items())
            for record in report.records.records
            if record.WhichOneof("event") == kind and record.attempt == attempt
        ]

    def ended(self, attempt: int = 1) -> pb.GangEnded | None:
        told = self.ends(attempt)
        return told[0] if told else None

    def ends(self, attempt: int = 1) -> list[pb.GangEnded]:
        """Of all nodes, in the order in which they were told."""
        return [each.gang_ended for each in self.reports if each.HasField("gang_ended") and each.attempt == attempt]

    def wait_ended(self, attempt: int = 1, within_s: float = 30.0) -> pb.GangEnded:
        wait_until(lambda: self.ended(attempt), within_s, f"the end of attempt {attempt}")
        return self.ended(attempt)


@dataclass
class Data(DataServiceServicer):
    """Grants 16 steps. newest: attempts below it are superseded."""

    newest: int = 1
    steps: list[int] = field(default_factory=list)
    callers: list = field(default_factory=list)

    def GetReadingPlan(self, request, context):  # noqa: N802
        self.callers.append(caller(context))
        if request.attempt < self.newest:
            raise Superseded(f"attempt {request.attempt}", expected=f"attempt {self.newest}", remedy="let it end")
        self.steps.append(request.step)
        plan = data_pb.ReadingPlan(horizon_step=request.step + 16, journal_digest=journal_digest(()))
        return data_pb.GetReadingPlanResponse(plan=plan)


@dataclass
class Checkpoint(CheckpointServiceServicer):
    """Commits whatever it is asked to. commit: what else is done with a draft."""

    commit: Callable = lambda draft: None
    calls: list[str] = field(default_factory=list)
    callers: list = field(default_factory=list)

    def BeginCheckpoint(self, request, context):  # noqa: N802
        self.calls.append(f"begin {request.ref.step}")
        return checkpoint_pb.BeginCheckpointResponse()

    def CommitCheckpoint(self, request, context):  # noqa: N802
        self.callers.append(caller(context))
        self.commit(request.draft)
        self.calls.append(f"commit {request.draft.ref.step}")
        return checkpoint_pb.CommitCheckpointResponse()


@dataclass
class Receiver(MetricsServiceServicer):
    """Takes figures by OTLP, as the monitor does. rows: figures by name, one mapping a row."""

    rows: list[dict[str, float]] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)

    def Export(self, request, context):  # noqa: N802
        assert caller(context).role is Role.AGENT
        for each in request.resource_metrics:
            self.jobs |= {item.value.string_value for item in each.resource.attributes if item.key == "phalanx.job"}
            metrics = [metric for scope in each.scope_metrics for metric in scope.metrics]
            self.rows.append({metric.name: metric.gauge.data_points[0].as_double for metric in metrics})
        return ExportMetricsServiceResponse()


@dataclass
class World:
    """The three services on loopback, each with its server, which can be stopped and started again where it was."""

    cluster: Cluster
    folder: Path
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    receiver: Receiver = field(default_factory=Receiver)
    servers: dict[str, Server] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def start(self, name: str) -> None:
        services = {
            "train": self.train,
            "data": self.data,
            "checkpoint": self.checkpoint,
            "monitor": self.receiver,
        }
        service = services[name]
        add, methods = {
            "train": (add_AgentServiceServicer_to_server, ["/phalanx.api.agent.v1.AgentService/Connect"]),
            "data": (add_DataServiceServicer_to_server, ["/phalanx.api.data.v1.DataService/GetReadingPlan"]),
            "monitor": (
                add_MetricsServiceServicer_to_server,
                ["/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"],
            ),
            "checkpoint": (
                add_CheckpointServiceServicer_to_server,
                [
                    f"/phalanx.api.checkpoint.v1.CheckpointService/{method}"
                    for method in ("BeginCheckpoint", "CommitCheckpoint")
                ],
            ),
        }[name]
        config = self.cluster.service(name)
        config = replace(config, listen=self.addresses.get(name, config.listen))
        access = dict.fromkeys(methods, AGENTS)
        self.servers[name] = serve(config, [lambda server: add(service, server)], access)
        self.addresses[name] = self.servers[name].address

    def stop(self, name: str) -> None:
        self.servers.pop(name).stop(0.0)

    def agent_config(self, **options) -> ServiceConfig:
        files = self.cluster.pki.issue("agent")
        token = self.cluster.credentials(Role.AGENT, name="agent").token
        security = Security(files.ca, files.cert, files.key, self.cluster.folder / "token.pub", token)
        chosen = {"state_dir": str(self.folder / "agent"), "slots": 8, "heartbeat_s": 0.2, **options}
        return ServiceConfig(
            "agent", "127.0.0.1:0", security, metrics="127.0.0.1:0", services=self.addresses, options=chosen
        )

    def token(self, attempt: int = 1) -> str:
        return self.cluster.tokens.mint("gang", Role.AGENT, "default", "tiny", attempt)

    def start_gang(self, do: str, attempt: int = 1, world_size: int = 2, order_id: str = "", **arguments) -> pb.Answer:
        order = self.gang_order(do, attempt, world_size, **arguments)
        return self.train.ask(attempt=attempt, order_id=order_id, start_gang=order)

    def gang_order(self, do: str, attempt: int = 1, world_size: int = 2, **arguments) -> pb.StartGang:
        known = {name: arguments.pop(name) for name in ("ranks", "rendezvous", "digest") if name in arguments}
        return pb.StartGang(
            arguments_json=json.dumps({"do": do, **arguments}),
            world_size=world_size,
            ranks=known.get("ranks", range(world_size)),
            rendezvous=known.get("rendezvous", ""),
            token=self.token(attempt),
            code_digest=known.get("digest", code_digest()),
        )


class AgentProcess:
    """An agent in a process of its own, to be killed."""

    def __init__(self, world: World, **options) -> None:
        path = world.folder / "agent.toml"
        write_config(path, world.agent_config(**options))
        self.log = world.folder / "agent.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "agent_program.py"), str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(HERE)},
                start_new_session=True,
            )

    def descendants(self) -> list[int]:
        """Fork servers and ranks."""
        found, parents = [], [self.process.pid]
        while parents:
            parent = parents.pop()
            try:
                tasks = list(Path(f"/proc/{parent}/task").iterdir())
                children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += children
            parents += children
        return found


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
