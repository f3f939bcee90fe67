"""Reading plans a second from the data service, beside an empty handler: once a bare one of Python's gRPC library, once
one behind everything that our services put before a call (mutual TLS, tokens, limits, metrics).

The three are processes of their own and take turns, round after round, so that what else runs meets all alike; the
ratios are those of the medians. Run: python benchmarks/data/plans.py [--rounds 7] [--seconds 2] [--threads 1 8]; prints
one JSON line for each number of calling threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.data_service import data_process, register_job
from support.datasets import open_attempt, write_dataset
from support.ministack import free_port

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.api.data.v1.data_service_pb2_grpc import DataServiceServicer, add_DataServiceServicer_to_server
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.access import ACCESS
from phalanx.data.client import connect_data
from phalanx.rpc import Role, serve, write_config
from phalanx.rpc.config import read_service
from phalanx.rpc.testing import Cluster

METHOD = "/phalanx.api.data.v1.DataService/GetReadingPlan"
JOB, UID = "projects/default/jobs/tiny", "tiny"
WORKERS = 8
Call = Callable[[], object]


class _Empty(DataServiceServicer):
    def GetReadingPlan(  # noqa: N802 - the contract's name
        self, request: pb.GetReadingPlanRequest, context: grpc.ServicerContext
    ) -> pb.GetReadingPlanResponse:
        return pb.GetReadingPlanResponse()


def serve_bare(address: str) -> None:
    """An empty handler, without TLS, tokens or metrics, until it is ended."""
    server = grpc.server(ThreadPoolExecutor(WORKERS))
    add_DataServiceServicer_to_server(_Empty(), server)
    server.add_insecure_port(address)
    server.start()
    signal.sigwait({signal.SIGTERM})


def serve_guarded(config: str) -> None:
    """An empty handler behind what stands before every call of our services, until it is ended."""
    with serve(
        read_service(Path(config)), [lambda server: add_DataServiceServicer_to_server(_Empty(), server)], ACCESS
    ):
        signal.sigwait({signal.SIGTERM})


@contextlib.contextmanager
def child(mode: str, argument: str) -> Iterator[None]:
    """One of the two, as a process of its own."""
    command = [sys.executable, __file__, mode, argument]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def rate(call: Call, threads: int, seconds: float) -> float:
    """Calls a second by so many threads."""
    counts, begin = [0] * threads, time.perf_counter()

    def work(number: int) -> None:
        while time.perf_counter() - begin < seconds:
            call()
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - begin)


def guarded_config(cluster: Cluster, folder: Path) -> tuple[str, str]:
    """The file of a second service, and its address."""
    address = f"127.0.0.1:{free_port()}"
    config = cluster.service("data", listen=address, metrics=f"127.0.0.1:{free_port()}", storage=f"file://{folder}")
    write_config(folder / "guarded.toml", config)
    return str(folder / "guarded.toml"), address


def measure(folder: Path, rounds: int, seconds: float, threads: list[int]) -> None:
    """Starts the three, and prints what they do."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(data_process(folder))
        data = write_dataset(f"file://{folder}/corpus")
        open_attempt(register_job(service.storage, f"{data}/train", UID))
        bare = f"127.0.0.1:{free_port()}"
        config, guarded = guarded_config(service.cluster, folder)
        stack.enter_context(child("bare", bare))
        stack.enter_context(child("guarded", config))
        credentials = service.cluster.credentials(Role.AGENT, "default", UID, 1)
        plans = stack.enter_context(connect_data(service.address, credentials))
        empty = stack.enter_context(connect_data(guarded, credentials))
        channel = stack.enter_context(grpc.insecure_channel(bare))
        request = pb.GetReadingPlanRequest(job=JOB, attempt=1, step=5)
        raw: Any = channel.unary_unary(
            METHOD,
            request_serializer=pb.GetReadingPlanRequest.SerializeToString,
            response_deserializer=pb.GetReadingPlanResponse.FromString,
        )
        calls: dict[str, Call] = {
            "bare": lambda: raw(request, timeout=30.0, wait_for_ready=True),
            "guarded": lambda: empty.reading_plan(JOB, 1, 5),
            "plans": lambda: plans.reading_plan(JOB, 1, 5),
        }
        for call in calls.values():
            _until_ready(call)
        for count in threads:
            print(json.dumps(_figures(calls, count, rounds, seconds)), flush=True)


def _until_ready(call: Call) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            call()
        except (grpc.RpcError, OutsideError, PhalanxError):  # not up yet; raised once it should be
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)
        else:
            return


def _figures(calls: dict[str, Call], threads: int, rounds: int, seconds: float) -> dict[str, object]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(rate(call, threads, seconds))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return {
        "threads": threads,
        "calls_a_second": {name: round(value) for name, value in medians.items()},
        "spread": {name: [round(min(rates)), round(max(rates))] for name, rates in found.items()},
        "plans_to_bare": round(medians["plans"] / medians["bare"], 3),
        "plans_to_guarded": round(medians["plans"] / medians["guarded"], 3),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """The command line."""
    if len(sys.argv) == 3 and sys.argv[1] in ("bare", "guarded"):
        {"bare": serve_bare, "guarded": serve_guarded}[sys.argv[1]](sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.rounds, options.seconds, options.threads)


if __name__ == "__main__":
    main()
