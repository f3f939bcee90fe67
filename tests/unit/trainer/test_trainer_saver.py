"""When a rank saves, and how the failure of a save reaches the loop; over real files, for a gang of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed import HashStore

from phalanx.core.box import Box, HeldTensor
from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState
from phalanx.objects import StoreError, open_store
from phalanx.objects.faults import Fault, FaultyStore, delay, fail_before, on
from phalanx.snapshot import load
from phalanx.snapshot.writer import Writer
from phalanx.trainer.exchange import Exchange
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.saver import Notes, Saver, Stamp
from phalanx.trainer.storage_control import Proposal, StorageControl

DIGESTS = [sha256(name) for name in (b"identity", b"placement", b"code", b"journal")]
PATIENCE_S = 20.0


class Bench:
    """One rank with a tensor of its own, whose store has `faults`."""

    def __init__(
        self,
        folder: Path,
        faults: Sequence[Fault] = (),
        when_busy: Literal["wait", "skip"] = "wait",
        speculative_interval: int = 0,
    ) -> None:
        self.url = folder.as_uri()
        store = FaultyStore(open_store(self.url), faults)
        self.lineage = Lineage(open_store(self.url))
        proposal = Proposal(DIGESTS[2], DIGESTS[0], {})
        self.control = StorageControl(
            Lineage(store),
            store,
            Exchange(HashStore(), 0),
            proposal,
            rank=0,
            world_size=1,
            deadline_s=PATIENCE_S,
            report=lambda kind, **fields: None,
        )
        self.control.open()
        self.weight = torch.zeros(4, 3)
        held = HeldTensor("model.weight", (4, 3), Box((0, 0), (4, 3)), self.weight)
        self.saver = Saver(
            self.control,
            Writer(store, 0, 1, deadline_s=PATIENCE_S),
            Recorder(Lineage(store), 1, 0, 0, records_windows=False, records_steps=False),
            Stamp(1, 1, *DIGESTS[:3]),
            lambda: [held],
            interval=2,
            when_busy=when_busy,
            deadline_s=PATIENCE_S,
            start_step=0,
            speculative_interval=speculative_interval,
        )

    def save(self, step: int) -> None:
        """The state after `step`, with the step's number in every element."""
        self.weight.fill_(float(step))
        self.saver.save(LoaderState(step, step * 8), DIGESTS[3], {"num_updates": step})
        self.saver.wait_captured()
        self.weight.fill_(-1.0)  # training goes on


def test_save_captures_the_state_of_its_step_and_is_committed_after_finish(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in (2, 4):
        bench.save(step)
    bench.saver.finish()
    assert bench.lineage.checkpoints() == (CheckpointRef(1, 2), CheckpointRef(1, 4))
    for step in (2, 4):
        assert (load(bench.url, step)["model.weight"] == float(step)).all()
    assert not bench.saver.busy


def test_save_of_the_same_step_twice_is_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(2)
    bench.save(2)
    bench.saver.finish()
    assert bench.lineage.checkpoints() == (CheckpointRef(1, 2),)


def test_due_follows_the_interval(tmp_path: Path) -> None:
    saver = Bench(tmp_path).saver
    assert [step for step in range(1, 7) if saver.due(step)] == [2, 4, 6]


def test_speculative_saves_are_due_between_the_regular_ones(tmp_path: Path) -> None:
    saver = Bench(tmp_path, speculative_interval=3).saver
    assert [step for step in range(1, 10) if saver.due(step)] == [2, 3, 4, 6, 8, 9]
    assert [step for step in range(1, 10) if saver.is_speculative(step)] == [3, 9]


def test_save_says_in_its_manifest_that_it_is_speculative_and_what_was_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(2)
    notes = Notes(speculative=True, metrics={"validation_loss": 2.5})
    bench.saver.save(LoaderState(3, 24), DIGESTS[3], {"num_updates": 3}, notes)
    bench.saver.finish()
    found = {ref.step: bench.lineage.manifest(ref) for ref in bench.lineage.checkpoints()}
    assert {step: (each.speculative, dict(each.metrics)) for step, each in found.items()} == {
        2: (False, {}),
        3: (True, {"validation_loss": 2.5}),
    }


def test_failed_upload_is_raised_long_before_the_commit_gives_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [fail_before(on("create", "parts/"), StoreError("the disk is gone"))])
    bench.save(2)
    started = time.monotonic()
    with pytest.raises(StoreError, match="the disk is gone"):
        while time.monotonic() - started < PATIENCE_S / 2:
            bench.saver.check()
    assert bench.lineage.checkpoints() == ()


def test_failed_commit_is_raised_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [fail_before(on("create", "manifest.json"), StoreError("no space for the manifest"))])
    bench.save(2)
    with pytest.raises(StoreError, match="no space for the manifest"):
        bench.saver.finish()
    assert bench.lineage.checkpoints() == ()


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_due_save_while_the_last_one_goes_on_waits_or_is_left_out_and_counted(
    tmp_path: Path, when_busy: Literal["wait", "skip"]
) -> None:
    go = threading.Event()
    bench = Bench(tmp_path, [delay(on("create", "manifest.json"), lambda: go.wait(PATIENCE_S))], when_busy)
    bench.save(2)
    assert bench.saver.busy
    assert bench.saver.skips(4, bench.saver.busy) == (when_busy == "skip")
    assert bench.saver.num_skipped == (1 if when_busy == "skip" else 0)
    assert not bench.saver.skips(4, False)
    go.set()
    bench.saver.finish()
    assert bench.lineage.checkpoints() == (CheckpointRef(1, 2),)


def test_saves_cost_is_told_once_committed_and_a_left_out_one_at_once(tmp_path: Path) -> None:
    go = threading.Event()
    bench = Bench(tmp_path, [delay(on("create", "manifest.json"), lambda: go.wait(PATIENCE_S))], "skip")
    bench.save(2)
    assert bench.saver.take_costs() == []
    assert bench.saver.skips(4, bench.saver.busy)
    (left_out,) = bench.saver.take_costs()
    assert (left_out.step, left_out.num_skipped, left_out.stall_s, left_out.figures) == (4, 1, None, None)
    go.set()
    bench.saver.finish()
    (cost,) = bench.saver.take_costs()
    assert cost.step == 2 and cost.stall_s is not None and cost.figures is not None
    assert 0 < cost.stall_s < PATIENCE_S and cost.figures.num_bytes > bench.weight.nbytes
    assert bench.saver.take_costs() == []


def test_wait_for_the_save_before_and_for_the_copy_is_in_the_stall(tmp_path: Path) -> None:
    waited_s = 0.3
    bench = Bench(tmp_path, [delay(on("create", "s00000002/parts/"), lambda: threading.Event().wait(waited_s))])
    bench.save(2)
    with bench.saver._writer._buffer._lock:
        letting_go = threading.Timer(waited_s, bench.saver._writer._buffer._lock.release)
        bench.saver.finish()
        bench.saver.save(LoaderState(4, 32), DIGESTS[3], {"num_updates": 4})
        letting_go.start()
        bench.saver.wait_captured()
        bench.saver._writer._buffer._lock.acquire()
    bench.saver.finish()
    costs = {cost.step: cost.stall_s for cost in bench.saver.take_costs()}
    assert costs[2] is not None and costs[2] < waited_s
    assert costs[4] is not None and costs[4] >= 2 * waited_s * 0.9


def test_upload_past_its_deadline_is_told_with_its_step(tmp_path: Path) -> None:
    go = threading.Event()
    bench = Bench(tmp_path, [delay(on("create", "parts/"), lambda: go.wait(PATIENCE_S))])
    bench.saver._deadline_s = 0.2
    bench.save(2)
    with pytest.raises(OutsideError, match=r"saving step 2 was not done within 0\.2 s"):
        bench.saver.finish()
    go.set()
    bench.control.close()
