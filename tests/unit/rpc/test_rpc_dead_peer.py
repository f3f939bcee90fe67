"""A peer that is there for the kernel and gone for everybody else: stopped by SIGSTOP, on either side of a stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import rpc_kit as kit

from phalanx.rpc import Unavailable, connect, ended
from phalanx.rpc.testing import Cluster

NOTICED_WITHIN_S = 20


@contextmanager
def _process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = Path(__file__).with_name("dead_peer_process.py")
    with subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_server_that_stands_still_is_noticed_by_a_stream_and_by_calls(cluster: Cluster) -> None:
    with (
        _process("serve", str(cluster.folder)) as (process, address),
        connect("echo", address, cluster.credentials()) as channel,
    ):
        stream = kit.stub(channel).Count(kit.pb.Cursor())
        assert next(stream).at == 1
        os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match=r"service echo at .* went away"):
            next(stream)
        assert time.monotonic() - began_s < NOTICED_WITHIN_S
        with pytest.raises(Unavailable):
            kit.stub(channel).Do(kit.pb.Words(), timeout=1)
        os.kill(process.pid, signal.SIGCONT)
        channel.wait_ready(30)
        assert next(kit.stub(channel).Count(kit.pb.Cursor())).at == 1


def test_client_that_stands_still_is_noticed_by_the_handler_of_its_stream(cluster: Cluster) -> None:
    over = threading.Event()

    def count(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield kit.pb.Cursor(at=1)
        ended(context).wait(60)
        over.set()

    with (
        kit.serve_echo(cluster, kit.Echo(Count=count)) as server,
        _process("follow", str(cluster.folder), server.address) as (process, first),
    ):
        assert first == "1"
        os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert over.wait(60)
        assert time.monotonic() - began_s < NOTICED_WITHIN_S
