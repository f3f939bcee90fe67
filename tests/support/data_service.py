"""The data service as a process on loopback, with real certificates and tokens, and jobs registered for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.client import DataClient, connect_data
from phalanx.lineage.registry import RegisteredJob, Registry
from phalanx.objects import open_store
from phalanx.rpc import Database, Role, Unavailable, connect, write_config
from phalanx.rpc.testing import Cluster, make_cluster
from phalanx.spec import Job, parse_job
from support.datasets import job_tables
from support.ministack import free_port

START_S = 60.0


@dataclass(slots=True)
class DataProcess:
    """`python -m phalanx.data`, started and killed as often as one likes, always at the same port."""

    folder: Path
    cluster: Cluster
    address: str
    metrics: str
    config: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; returns at once."""
        with (self.folder / "data.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.data", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self) -> None:
        """Returns when it serves."""
        with connect("data", self.address, self.cluster.credentials(Role.VIEWER)) as channel:
            end_s = time.monotonic() + START_S
            while True:
                assert self.process is not None and self.process.poll() is None, self.log()
                try:
                    channel.wait_ready(1.0)
                except Unavailable:
                    assert time.monotonic() < end_s, self.log()
                else:
                    return

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "data.log").read_text(errors="replace")

    def client(self, role: Role = Role.OPERATOR, project: str = "", job: str = "", attempt: int = 0) -> DataClient:
        """A client of that role and scope."""
        return connect_data(self.address, self.cluster.credentials(role, project, job, attempt))

    def gang(self, job: str = "tiny", attempt: int = 1, project: str = "default") -> DataClient:
        """What the agent of an attempt's rank 0 holds."""
        return self.client(Role.AGENT, project, job, attempt)

    @property
    def storage(self) -> str:
        """URL of the cluster's root."""
        return f"file://{self.folder}/store"


@contextmanager
def data_process(folder: Path, **options: Any) -> Iterator[DataProcess]:
    """The service, started and serving; killed on leaving."""
    cluster = make_cluster(folder)
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    config = cluster.service(
        "data",
        listen=address,
        metrics=metrics,
        storage=f"file://{folder}/store",
        database=Database(f"sqlite:///{folder}/data.sqlite"),
        options=options,
    )
    write_config(folder / "data.toml", config)
    service = DataProcess(folder, cluster, address, metrics, folder / "data.toml")
    service.start()
    try:
        service.wait_ready()
        yield service
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()


def register_job(storage: str, train: str | None, name: str = "tiny", **options: Any) -> Job:
    """A job in the cluster's registry, as train leaves it there; its own objects lie in the same store."""
    tables = job_tables(storage, train, name, **options)
    Registry(open_store(storage)).create_job(RegisteredJob("default", name, storage, tables, f"submit-{name}", "ada"))
    return parse_job(tables)
