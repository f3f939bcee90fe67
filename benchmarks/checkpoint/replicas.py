"""Times the restore of one node's share: from its own memory, from a partner node's over mTLS, and from storage.

The partner is a process of its own on this machine, reached by gRPC as in a cluster; the way to it is loopback. Storage
is a folder (read with and without the pages that the system keeps of it) or any URL. Every restore verifies all bytes.

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

from phalanx.agent.replica_client import PeerMemory
from phalanx.agent.replica_server import ACCESS, ReplicaServer
from phalanx.agent.replicas import ReplicaMemory
from phalanx.api.agent.v1.replica_service_pb2_grpc import add_ReplicaServiceServicer_to_server
from phalanx.core.box import HeldTensor, whole
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest, ObjectRef, keys
from phalanx.objects import ObjectStore, open_store
from phalanx.rpc import Role, connect, serve
from phalanx.rpc.testing import make_cluster
from phalanx.snapshot import commit
from phalanx.snapshot.parts import parse_part
from phalanx.snapshot.replica_store import Holder, ReplicaStore
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST, JOB, OWNER = "sha256:" + "0" * 64, "projects/p/jobs/j", "a"


def partner(folder: Path, ready: Connection) -> None:
    """The partner node: serves until it is killed."""
    memory = ReplicaMemory((OWNER,), 1 << 40)
    adders = [lambda server: add_ReplicaServiceServicer_to_server(ReplicaServer(lambda _: memory), server)]
    with serve(make_cluster(folder).service("agent"), adders, ACCESS) as server:
        ready.send(server.address)
        ready.recv()


def saved(store: ObjectStore, tensors: list[HeldTensor]) -> Manifest:
    """One checkpoint of these tensors."""
    lineage = Lineage(store)
    attempt = lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
    Writer(store, 0, 1).save(attempt, 1, tensors).wait(600)
    draft = Manifest(attempt, 1, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(1, 1), {}, (), ())
    return commit(lineage, store, draft, 1, 60)


def objects_of(store: ObjectStore, ref: CheckpointRef) -> list[ObjectRef]:
    """The tensor objects of the only rank."""
    key = keys.part(ref, 0)
    return [ObjectRef(each.key, each.num_bytes, each.digest) for each in parse_part(key, store.read(key)).objects]


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


def main() -> None:
    """Puts one share to the partner, then restores it from everywhere in turn."""
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
    manifest = saved(store, tensors)
    ref, objects = manifest.ref, objects_of(store, manifest.ref)
    data = {each.key: memoryview(store.read(each.key)) for each in objects}
    own = ReplicaMemory((OWNER,), 1 << 40)
    credentials = make_cluster(folder).credentials(Role.AGENT, "p", "j", ref.attempt)
    with connect("agent", address, credentials) as channel:
        peer = PeerMemory(channel, JOB, ref.attempt)
        put_s = seconds(lambda: peer.put(ref, OWNER, objects, lambda each: data[each.key], 600))
        own.begin(ref, OWNER, objects)
        for each in objects:
            own.write(ref, OWNER, each.key, 0, data[each.key])
        own.finish(ref, OWNER)

        def from_holder(holder: Holder) -> float:
            by_key = {each.key: each for each in objects}
            replicas = ReplicaStore(store, ref, by_key, lambda _: [holder])
            return seconds(lambda: restore(replicas, manifest, tensors))

        for number in range(1, rounds + 1):
            figures = {"put_to_partner_s": put_s, "own_memory_s": from_holder(own), "partner_s": from_holder(peer)}
            figures["storage_s"] = seconds(lambda: restore(store, manifest, tensors))
            if store.url.startswith("file:"):
                forget_pages(folder)
                figures["storage_cold_s"] = seconds(lambda: restore(store, manifest, tensors))
            mb = sum(each.num_bytes for each in objects) // 1_000_000
            print(json.dumps({"mb": mb, "round": number, **{name: round(s, 3) for name, s in figures.items()}}))


if __name__ == "__main__":
    main()
