"""The monitor as a process with its page, a train that tells it what a test wants, an exporter of GPU figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from support.data_service import register_job
from support.jobs import wait_until
from support.ministack import free_port

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import (
    CheckpointServiceServicer,
    add_CheckpointServiceServicer_to_server,
)
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceServicer, add_TrainServiceServicer_to_server
from phalanx.checkpoint.access import ACCESS as CHECKPOINT_ACCESS
from phalanx.monitor.client import MonitorClient, connect_monitor
from phalanx.monitor.testing import Told
from phalanx.rpc import Database, Role, Unavailable, ended, serve, write_config
from phalanx.rpc.testing import Cluster, make_cluster
from phalanx.train.access import ACCESS

START_S = 60.0
TRAIN_ACCESS = {method: roles for method, roles in ACCESS.items() if "/phalanx.api.train." in method}
LOG_ID = "log-1"


class TellingTrain(TrainServiceServicer):
    """Tells every watcher the same log from the number that it has, for ever; takes every incident."""

    def __init__(self) -> None:
        self._log: list[pb.WatchRecordsResponse] = []
        self._changed = threading.Condition()

    def tell(self, told: Iterable[pb.WatchRecordsResponse]) -> None:
        """Adds to the log, in one go."""
        with self._changed:
            for each in told:
                message = pb.WatchRecordsResponse()
                message.CopyFrom(each)
                message.log_id, message.number = LOG_ID, len(self._log) + 1
                self._log.append(message)
            self._changed.notify_all()

    def WatchRecords(self, request: pb.WatchRecordsRequest, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        has_left, at = ended(context), request.after if request.log_id == LOG_ID else 0
        while not has_left.is_set():
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._log) > at, 0.5)
                new = self._log[at:]
            yield from new or [pb.WatchRecordsResponse(log_id=LOG_ID, number=at)]
            at += len(new)

    def ListNodes(self, request: pb.ListNodesRequest, context: grpc.ServicerContext) -> pb.ListNodesResponse:  # noqa: N802
        nodes = [pb.Node(node_id=name, connected=True) for name in ("node-a", "node-b")]
        return pb.ListNodesResponse(nodes=nodes)

    def ReportIncident(self, request: Any, context: grpc.ServicerContext) -> pb.ReportIncidentResponse:  # noqa: N802
        return pb.ReportIncidentResponse(action=pb.INCIDENT_ACTION_NOTIFY, message="noted")


class ListingCheckpoints(CheckpointServiceServicer):
    """Says of each job which checkpoints it has: those that a test has put into `found`, and of others none."""

    def __init__(self) -> None:
        self.found: dict[str, list[checkpoint_pb.Checkpoint]] = {}

    def put(self, job: str, attempt: int, step: int, state: str = "live", **fields: Any) -> None:
        """One more checkpoint of a job."""
        ref = checkpoint_pb.CheckpointRef(attempt=attempt, step=step)
        number = checkpoint_pb.CheckpointState.Value(f"CHECKPOINT_STATE_{state.upper()}")
        checkpoint = checkpoint_pb.Checkpoint(ref=ref, state=number, **fields)
        checkpoint.create_time.GetCurrentTime()
        self.found.setdefault(job, []).append(checkpoint)

    def ListCheckpoints(self, request: Any, context: grpc.ServicerContext) -> checkpoint_pb.ListCheckpointsResponse:  # noqa: N802
        if request.job not in self.found:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such job")
        return checkpoint_pb.ListCheckpointsResponse(checkpoints=self.found[request.job])


@dataclass(slots=True)
class Monitor:
    """`python -m phalanx.monitor`, started and killed as often as one likes, always at the same addresses."""

    folder: Path
    cluster: Cluster
    train: TellingTrain
    checkpoints: ListingCheckpoints
    address: str
    page: str
    config: Path
    process: subprocess.Popen[bytes] | None = None
    jobs: dict[str, Told] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://{self.page}/"

    def start(self) -> None:
        """Starts it, and returns when it serves."""
        with (self.folder / "monitor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.monitor", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        with self.client() as client:
            end_s = time.monotonic() + START_S
            while True:
                assert self.process.poll() is None, self.log()
                try:
                    client.runs()
                except Unavailable:
                    assert time.monotonic() < end_s, self.log()
                    time.sleep(0.05)
                else:
                    return

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "monitor.log").read_text(errors="replace")

    def client(self) -> MonitorClient:
        """A viewer's client."""
        return connect_monitor(self.address, self.cluster.credentials(Role.VIEWER))

    def new_job(self, uid: str, num_steps: int = 500) -> Told:
        """A registered job; what is told of it goes through the answer to `tell`."""
        register_job(f"file://{self.folder}/store", f"file://{self.folder}/corpus", uid, steps=num_steps)
        return Told(f"projects/default/jobs/{uid}")

    def tell(self, told: Iterable[pb.WatchRecordsResponse]) -> None:
        """What train tells."""
        self.train.tell(told)

    def wait_step(self, told: Told, step: int) -> None:
        """Until the monitor has heard of a step."""
        with self.client() as client:
            wait_until(
                lambda: any(run.job == told.job and run.step >= step for run in client.runs()),
                START_S,
                f"no step {step} of {told.job}",
            )


@contextmanager
def told_by(cluster: Cluster) -> Iterator[tuple[TellingTrain, ListingCheckpoints, dict[str, str]]]:
    """A train that only tells, a checkpoint service that only lists, and their addresses."""
    train, checkpoints = TellingTrain(), ListingCheckpoints()
    with (
        serve(cluster.service("train"), [partial(add_TrainServiceServicer_to_server, train)], TRAIN_ACCESS) as telling,
        serve(
            cluster.service("checkpoint"),
            [partial(add_CheckpointServiceServicer_to_server, checkpoints)],
            CHECKPOINT_ACCESS,
        ) as listing,
    ):
        yield train, checkpoints, {"train": telling.address, "checkpoint": listing.address}


@contextmanager
def running_monitor(folder: Path, **options: Any) -> Iterator[Monitor]:
    """The monitor, serving; killed on leaving."""
    cluster = make_cluster(folder)
    address, page = f"127.0.0.1:{free_port()}", options.pop("page", f"127.0.0.1:{free_port()}")
    with told_by(cluster) as (train, checkpoints, addresses):
        config = cluster.service(
            "monitor",
            listen=address,
            storage=f"file://{folder}/store",
            database=Database(f"sqlite:///{folder}/monitor.sqlite"),
            services=addresses,
            options={"page": page, "nvml": False, "scrape_every_s": 0.5, **options},
        )
        write_config(folder / "monitor.toml", config)
        monitor = Monitor(folder, cluster, train, checkpoints, address, page, folder / "monitor.toml")
        monitor.start()
        try:
            yield monitor
        finally:
            if monitor.process is not None and monitor.process.poll() is None:
                monitor.kill()


def exporter_text(node: str = "node-a", num_gpus: int = 2) -> str:
    """What a dcgm-exporter answers."""
    lines = []
    for gpu in range(num_gpus):
        labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{node}"'
        figures = {
            "SM_CLOCK": 1980, "GPU_TEMP": 61 + gpu, "POWER_USAGE": 612.4, "GPU_UTIL": 97, "XID_ERRORS": 0,
            "FB_FREE": 20480, "FB_USED": 61440, "ECC_DBE_VOL_TOTAL": 0,
        }  # fmt: skip
        lines += [f"DCGM_FI_DEV_{name}{{{labels}}} {value}" for name, value in figures.items()]
    return "\n".join(lines) + "\n"


@contextmanager
def exporter() -> Iterator[str]:
    """Its address; it runs in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exporter_text().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
