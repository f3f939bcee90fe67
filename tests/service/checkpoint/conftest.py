"""A cluster with a checkpoint service as a real process, over mTLS on loopback, and clients for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import register
from support.ministack import set_environ

from phalanx.checkpoint.client import CheckpointClient, connect_checkpoint
from phalanx.lineage.registry import RegisteredJob
from phalanx.objects import open_store
from phalanx.rpc import Database, Role, connect, write_config
from phalanx.rpc.testing import Cluster, make_cluster

READY_S, END_S = 30.0, 30.0


class Service:
    """A checkpoint service that can be killed and started again at the same address."""

    def __init__(self, folder: Path, storage: str, options: dict[str, Any]) -> None:
        self.folder, self.root = folder, open_store(storage)
        self.cluster: Cluster = make_cluster(folder / "cluster")
        self.address = f"127.0.0.1:{_free_port()}"
        self.database = folder / "checkpoint.sqlite"
        self._config, self._storage = folder / "checkpoint.toml", storage
        self._clients: list[CheckpointClient] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.configure(**options)

    def configure(self, **options: Any) -> None:
        """Writes the service's file; holds from its next start."""
        database = Database(f"sqlite:///{self.database}")
        config = self.cluster.service(
            "checkpoint", listen=self.address, storage=self._storage, database=database, options=options
        )
        write_config(self._config, config)

    def start(self) -> None:
        """Starts it, and returns once it serves."""
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "phalanx.checkpoint", "--config", str(self._config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        credentials = self.cluster.credentials(Role.VIEWER, name="probe")

        with connect("checkpoint", self.address, credentials) as channel:
            channel.wait_ready(READY_S)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends the process with a signal; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def client(
        self, role: Role = Role.OPERATOR, job: RegisteredJob | None = None, attempt: int = 0
    ) -> CheckpointClient:
        """A client of that role and scope."""
        project, uid = (job.project, job.uid) if job else ("", "")
        credentials = self.cluster.credentials(role, project, uid, attempt, name=f"client-{len(self._clients)}")
        client = connect_checkpoint(self.address, credentials)
        self._clients.append(client)
        return client

    def gang(self, job: RegisteredJob, attempt: int) -> CheckpointClient:
        """A client with the token of an attempt's gang."""
        return self.client(Role.AGENT, job, attempt)

    def log(self) -> str:
        """What the process wrote."""
        return (self.folder / "log").read_text()

    def close(self) -> None:
        """Ends clients and process."""
        for client in self._clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)


@pytest.fixture(params=["file", "s3"], scope="module")
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty cluster root."""
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('store')}"
        return
    endpoint, bucket = request.getfixturevalue("ministack"), request.getfixturevalue("s3_bucket")
    with pytest.MonkeyPatch.context() as patch:
        set_environ(patch, endpoint.environ)
        yield f"{bucket}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, storage: str) -> Iterator[Service]:
    """A service that has started, collecting only when asked, without a grace; shared by the tests of a module."""
    service = Service(tmp_path_factory.mktemp("service"), storage, {"grace_s": 0.0, "interval_s": 3600.0})
    try:
        service.start()
        yield service
    finally:
        service.close()


NewJob = Callable[..., RegisteredJob]


@pytest.fixture
def new_job(service: Service) -> NewJob:
    """Registers jobs under fresh names; keywords are keys of `[checkpoint]`."""
    return lambda **settings: register(service.root, f"j-{uuid.uuid4().hex[:8]}", **settings)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
