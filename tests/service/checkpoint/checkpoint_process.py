"""A checkpoint service as a real process that can be killed and started again, over mTLS on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.checkpoint.client import CheckpointClient, connect_checkpoint
from phalanx.lineage.registry import RegisteredJob
from phalanx.objects import open_store
from phalanx.rpc import Database, Role, connect, write_config
from phalanx.rpc.testing import Cluster, make_cluster

READY_S, END_S = 120.0, 30.0


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
            "checkpoint",
            listen=self.address,
            metrics="127.0.0.1:0",
            storage=self._storage,
            database=database,
            options=options,
        )
        write_config(self._config, config)

    def spawn(self, *program: str) -> subprocess.Popen[bytes]:
        """Starts it, or another program with its file, and returns at once."""
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, *(program or ("-m", "phalanx.checkpoint")), "--config", str(self._config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return self.process

    def start(self) -> None:
        """Starts it, and returns once it serves."""
        self.spawn()
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
