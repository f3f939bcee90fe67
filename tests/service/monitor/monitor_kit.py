"""A monitor as a process of its own, and around it what it talks to: a train that tells what a test says, exporters of
GPU figures, a webhook.
"""

from __future__ import annotations

import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceServicer, add_TrainServiceServicer_to_server
from phalanx.monitor.client import MonitorClient, connect_monitor
from phalanx.rpc import Database, Role, Server, ServiceConfig, ended, serve, write_config
from phalanx.rpc.testing import Cluster

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true answer within the deadline."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)
    return found


class Train(TrainServiceServicer):
    """Tells what `tell` is given, keeps it as train does, and takes verdicts. heard: nodes that are connected."""

    def __init__(self, log_id: str = "log-1") -> None:
        self.log_id, self.told, self.reports = log_id, [], []
        self.heard = ["node-a", "node-b"]
        self.answer = train_pb.ReportIncidentResponse(action=train_pb.INCIDENT_ACTION_NOTIFY, message="noted")
        self.is_down = False
        self._changed = threading.Condition()

    def tell(self, told: Any) -> None:
        with self._changed:
            self.told.extend(told)
            self._changed.notify_all()

    def WatchRecords(self, request, context):  # noqa: N802
        over = ended(context)
        after = request.after if request.log_id == self.log_id else 0
        while not over.is_set():
            with self._changed:
                new = [each for each in self.told if each.number > after]
                if not new:
                    self._changed.wait(0.2)
            yield from new
            after = new[-1].number if new else after
            if not new:
                yield train_pb.WatchRecordsResponse(log_id=self.log_id, number=after)

    def ReportIncident(self, request, context):  # noqa: N802
        if self.is_down:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.reports.append(request)
        return self.answer

    def ListNodes(self, request, context):  # noqa: N802
        return train_pb.ListNodesResponse(
            nodes=[train_pb.Node(node_id=name, connected=True, silent_s=0.5) for name in self.heard]
        )


def serve_train(cluster: Cluster, train: Train, listen: str = "127.0.0.1:0") -> Server:
    """The train of a test, as the monitor may call it."""
    service = "/phalanx.api.train.v1.TrainService/"
    access = {f"{service}{name}": {Role.SERVICE} for name in ("WatchRecords", "ReportIncident", "ListNodes")}
    add = lambda server: add_TrainServiceServicer_to_server(train, server)  # noqa: E731
    return serve(cluster.service("train", listen=listen), [add], access)


class Monitor:
    """`python -m phalanx.monitor`, started and killed at will; it keeps its address over restarts."""

    def __init__(self, cluster: Cluster, folder: Path, **settings: Any) -> None:
        self.cluster, self.folder = cluster, folder
        self.path, self.log = folder / "monitor.toml", folder / "monitor.log"
        database = Database(f"sqlite:///{folder}/monitor.sqlite")
        settings = {"database": database, "metrics": "127.0.0.1:0", **settings}
        self.config: ServiceConfig = cluster.service("monitor", **settings)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Monitor:
        write_config(self.path, self.config)
        seen = len(self.text())
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "phalanx.monitor", "--config", str(self.path)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        found = wait_until(lambda: self._serving(self.text()[seen:]), "the monitor serves")
        address, metrics = found
        self.config = replace(self.config, listen=address, metrics=metrics)
        return self

    def _serving(self, text: str) -> tuple[str, str] | None:
        assert self.process is not None and self.process.poll() is None, f"the monitor ended:\n{text}"
        for line in text.splitlines():
            if "serving at " in line and "metrics at " in line:
                words = line.replace(",", "").split()
                return words[words.index("serving") + 2], words[words.index("metrics") + 2]
        return None

    @property
    def address(self) -> str:
        return self.config.listen

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> int:
        if self.process is None or self.process.poll() is not None:
            return self.process.returncode if self.process else 0
        self.signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(20)

    @contextmanager
    def client(self, role: Role = Role.VIEWER, **scope: Any) -> Iterator[MonitorClient]:
        with connect_monitor(self.address, self.cluster.credentials(role, **scope)) as client:
            yield client

    def alerted(self) -> set[str]:
        """Incidents of which its database says that people were told."""
        database = sqlite3.connect(f"file:{self.folder}/monitor.sqlite?mode=ro", uri=True, timeout=10)
        with closing(database):
            return {row[0] for row in database.execute("SELECT id FROM incidents WHERE is_alerted")}

    def figures(self) -> str:
        from urllib.request import urlopen

        return urlopen(f"http://{self.config.metrics}/metrics", timeout=5).read().decode()


EXPORTER = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

body = Path(sys.argv[1])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        kind, _, text = body.read_text().partition("\\n")
        self.send_response(500 if kind == "error" else 200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        try:
            if kind == "huge":
                for _ in range(400):
                    self.wfile.write((text + "\\n").encode() * 2000)
            elif kind == "slow":
                for letter in text:
                    self.wfile.write(letter.encode())
                    self.wfile.flush()
                    time.sleep(0.05)
            else:
                self.wfile.write(text.encode())
        except OSError:
            pass

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
sys.stdout.write(f"{server.server_address[1]}\\n")
sys.stdout.flush()
server.serve_forever()
"""


class Exporter:
    """An HTTP server process on /metrics that answers what its file says: `kind` in the first line, text behind."""

    def __init__(self, folder: Path) -> None:
        self.body = folder / "exporter.txt"
        self.port = 0
        self.answer("good", "")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", EXPORTER, str(self.body), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def answer(self, kind: str, text: str) -> None:
        temporary = self.body.with_suffix(".new")
        temporary.write_text(f"{kind}\n{text}")
        temporary.replace(self.body)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


class Hook:
    """A webhook: what was posted, and how it answers."""

    def __init__(self) -> None:
        import json
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self.posts: list[dict[str, Any]] = []
        self.status = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(hook.status)
                self.end_headers()
                if hook.status == 200:
                    hook.posts.append({**data, "path": self.path})

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?token=secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def follow_in_thread(client: MonitorClient, job: str, version: int, stop: threading.Event) -> queue.Queue[Any]:
    """What `watch` gives, in a queue."""
    found: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        for change in client.watch(job, version, stop=stop):
            found.put(change)

    threading.Thread(target=run, daemon=True).start()
    return found
