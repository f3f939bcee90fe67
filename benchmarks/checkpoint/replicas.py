"""Times what nodes keep in memory for each other, beside storage: the same tensors, in turn, in one run.

A rank takes its share (`capture`: until the tensors may change; `take`: until all is hashed) in one of two memories in
turn (`fresh_mb`: what the system had to give for it), its agent takes it over without a copy (`map`), and a partner
agent, a process of its own, gets it over TLS on loopback (`push`). Then the tensors are restored from the memory of
this node and from storage; every restore verifies all bytes. Storage is a folder (read with and without the pages that
the system keeps of it) or any URL.

Run: python benchmarks/checkpoint/replicas.py [--mb 500] [--url URL] [--rounds 3]; prints one JSON line a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from phalanx.agent.replica_client import push
from phalanx.agent.replica_server import ReplicaServer
from phalanx.agent.replicas import Head, Held, ReplicaMemory, mapped
from phalanx.core.box import HeldTensor, whole
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.rpc import Role
from phalanx.rpc.testing import make_cluster
from phalanx.snapshot import commit
from phalanx.snapshot.parts import Part
from phalanx.snapshot.replica_share import ReplicaCapture, ShareMemory
from phalanx.snapshot.replica_store import ReplicaStore
from phalanx.snapshot.replicas import Kept
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST, JOB = "sha256:" + "0" * 64, "projects/p/jobs/j"


def partner(folder: Path, ready: Connection) -> None:
    """The partner node: takes shares until it is killed."""
    server = ReplicaServer(ReplicaMemory(1 << 40), make_cluster(folder).service("agent").security, "127.0.0.1")
    ready.send(server.address)
    ready.recv()


def saved(store: ObjectStore, tensors: list[HeldTensor]) -> Manifest:
    """One checkpoint of these tensors."""
    lineage = Lineage(store)
    attempt = lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
    Writer(store, 0, 1).save(attempt, 1, tensors).wait(600)
    draft = Manifest(attempt, 1, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(1, 1), {}, (), ())
    return commit(lineage, store, draft, 1, 60)


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def forget_pages(folder: Path) -> None:
    """Has the system drop what it keeps of the files."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def taken(ref: CheckpointRef, tensors: list[HeldTensor], memory: ShareMemory) -> tuple[Held, dict[str, float]]:
    """The share in memory as the agent holds it, and what it cost."""
    had_bytes = memory.allocated_bytes
    start = time.perf_counter()
    capture = ReplicaCapture(Part(ref.attempt, ref.step, 0, 1, (), ()), tensors, lambda store: (), memory)
    capture.captured.result(600)
    captured_s = time.perf_counter() - start
    share = capture.result.result(600)
    taken_s = time.perf_counter() - start
    head = Head(JOB, Kept(ref, 0, 1), 0, share.objects, share.num_bytes)
    start = time.perf_counter()
    held = mapped(head, os.dup(share.fd))
    mapped_s = time.perf_counter() - start
    fresh_mb = (memory.allocated_bytes - had_bytes) / 1e6
    return held, {"capture_s": captured_s, "take_s": taken_s, "map_s": mapped_s, "fresh_mb": fresh_mb}


def main() -> None:
    """Takes and pushes a share, then restores it from everywhere in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--url", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = (2048, 2048)
    count = max(1, options.mb * 1_000_000 // (4 * 2048 * 2048))
    tensors = [HeldTensor(f"model.{n}", shape, whole(shape), torch.randn(shape)) for n in range(count)]
    folder = Path(tempfile.mkdtemp())
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=partner, args=(folder, there), daemon=True)
    process.start()
    try:
        measure(open_store(options.url or f"file://{folder}/job"), folder, here.recv(), tensors, options.rounds)
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder)


def measure(store: ObjectStore, folder: Path, address: str, tensors: list[HeldTensor], rounds: int) -> None:
    """Prints the figures of each round."""
    saving_s = time.perf_counter()
    manifest = saved(store, tensors)
    saving_s = time.perf_counter() - saving_s
    ref, cluster = manifest.ref, make_cluster(folder)
    credentials = cluster.credentials(Role.AGENT, name="agent-b")
    token = cluster.tokens.mint("agent-b", Role.AGENT, "p", "j", ref.attempt)
    memories = [ShareMemory() for _ in range(2)]
    for number in range(1, rounds + 1):
        held, figures = taken(ref, tensors, memories[number % 2])
        figures["push_s"] = seconds(lambda held=held: push(address, credentials, token, held, 600))
        views = {each.ref.key: held.view(each) for each in held.head.objects}
        figures["memory_s"] = seconds(lambda views=views: restore(ReplicaStore(store, views), manifest, tensors))
        figures["storage_s"] = seconds(lambda: restore(store, manifest, tensors))
        if store.url.startswith("file:"):
            forget_pages(folder)
            figures["storage_cold_s"] = seconds(lambda: restore(store, manifest, tensors))
        mb = held.head.num_bytes // 1_000_000
        shown = {name: round(s, 3) for name, s in ({"save_s": saving_s} | figures).items()}
        print(json.dumps({"mb": mb, "round": number, **shown}))


if __name__ == "__main__":
    main()
