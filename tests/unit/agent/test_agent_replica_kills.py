"""Kills at every point of copies in memory, with the memories that agents have: what is sealed can always be had."""

from __future__ import annotations

import gc
import mmap
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.agent.replicas import Head, Held, ReplicaMemory
from phalanx.core.digest import xxh3
from phalanx.lineage import CheckpointRef, ObjectRef, keys
from phalanx.snapshot.replicas import Kept, Placed, newest_whole, partner_of

JOB, NODES, STEPS = "projects/p/jobs/j", ("a", "b", "c"), 4
pytestmark = pytest.mark.timeout(60)


def head(step, sealed, rank, size=64):
    ref = CheckpointRef(1, step)
    data = bytes([step, rank]) * (size // 2)
    placed = Placed(ObjectRef(keys.tensors(ref, keys.number(rank), 0), size, xxh3(data)), 0)
    return Head(JOB, Kept(ref, rank, len(NODES)), sealed, (placed,), size), data


class Killed(Exception):
    """The run ends here."""


class Run:
    """Ranks that copy every step, one on each node, up to a point that is counted in things that agents do.

    fails: whether the hand-over of step 2 of one rank fails at its partner instead, and the run goes on.
    """

    def __init__(self, ends_at, fails=False):
        self.memories = {node: ReplicaMemory(1 << 20) for node in NODES}
        self.ends_at, self.fails = ends_at, fails
        self.num_points = self.sealed = self.lowest_sealed = 0

    def point(self):
        if self.num_points == self.ends_at:
            raise Killed
        self.num_points += 1

    def run(self):
        for step in range(1, STEPS + 1):
            whole = [self.hand_over(node, rank, step) for rank, node in enumerate(NODES)]
            self.point()
            if all(whole):  # the all-reduce: some ranks know it before others, so the next hand-overs may name either
                self.sealed = step
        return self

    def hand_over(self, node, rank, step):
        made, data = head(step, self.sealed, rank)
        own = mmap.mmap(-1, len(data))
        own[:] = data
        self.point()
        self.memories[node].begin(made)
        self.point()
        self.memories[node].finish(Held(made, own))
        self.point()
        if self.fails and step == 2 and rank == 1:
            return False
        partner = self.memories[partner_of(node, NODES)]
        partner.begin(made)
        self.point()
        came = partner.fresh(made)
        came.memory[: len(data)] = data
        self.point()
        partner.finish(came)
        self.point()
        return True

    def left(self, *lost):
        """The step that can be had of the other nodes."""
        return newest_whole({node: memory.kept(JOB) for node, memory in self.memories.items() if node not in lost})


def until_killed(ends_at, fails):
    run = Run(ends_at, fails)
    try:
        run.run()
    except Killed:
        return run
    return None


@pytest.mark.parametrize("fails", [False, True], ids=["all", "one-failed"])
def test_whatever_node_is_killed_wherever_the_sealed_step_or_a_later_one_is_left(fails):
    ends_at = 0
    while (run := until_killed(ends_at, fails)) is not None:
        ends_at += 1
        for lost in ((), *((node,) for node in NODES)):
            left = run.left(*lost)
            assert (left.step if left is not None else 0) >= run.sealed, f"point {run.ends_at}, lost {lost}"
    assert ends_at > 6 * len(NODES) * STEPS - 10, "every point was met"


@pytest.mark.parametrize("ends_at", range(0, 40, 3))
def test_memory_of_a_run_that_was_killed_is_gone_with_the_job(ends_at):
    run = until_killed(ends_at, fails=False)
    for memory in run.memories.values():
        assert memory.num_bytes + memory.spare_bytes <= 5 * 64, "two steps of two ranks, and one that was used before"
        memory.forget(JOB)
        assert memory.num_bytes == memory.spare_bytes == 0


def test_every_byte_that_is_kept_is_what_was_announced_though_memory_is_used_again():
    run = Run(ends_at=-1).run()
    for memory in run.memories.values():
        for kept in memory.kept(JOB):
            for held in memory.held(JOB, kept.ref):
                (placed,) = held.head.objects
                assert xxh3(held.view(placed)) == placed.ref.digest
        assert memory.allocated_bytes <= 3 * 64, "of the shares of four steps"


def test_memory_that_nobody_has_any_more_holds_no_file():
    before = anonymous_files()
    run = Run(ends_at=-1).run()
    kept = [held for memory in run.memories.values() for held in memory.held(JOB, CheckpointRef(1, STEPS))]
    assert len(anonymous_files() - before) >= len(NODES)
    del run
    assert all(xxh3(held.view(held.head.objects[0])) == held.head.objects[0].ref.digest for held in kept)
    del kept
    gc.collect()
    assert anonymous_files() <= before


def anonymous_files():
    """The inodes of those that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            if str(link.readlink()).startswith("/memfd:"):
                found.add(link.stat().st_ino)
    return found
