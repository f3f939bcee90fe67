"""Failures of a save and of a commit: told at the right call, by name, leaving nothing half-written; and deaths at
every moment.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from saved_job import (
    draft,
    emptied,
    file_store,
    open_attempt,
    random_tensor,
    rows_of,
    same_bits,
    save,
    some_tensors,
    whole_of,
)

from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import ObjectMissing, StoreError
from phalanx.objects.faults import FaultyStore, delay, fail_before, on
from phalanx.snapshot import IncompleteCheckpoint, commit, load
from phalanx.snapshot.restore import restore
from phalanx.snapshot.verify import verify
from phalanx.snapshot.writer import Writer


def test_save_with_one_passing_store_error_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    """Case 3."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    tensors = some_tensors()
    writer = Writer(FaultyStore(store, [fail_before(on("create", "objects/", nth=0), StoreError("injected"))]), 0, 1)
    with pytest.raises(StoreError, match="injected"):
        writer.save(attempt, 5, whole_of(tensors)).wait(30)
    writer.save(attempt, 6, whole_of(tensors)).wait(30)
    commit(Lineage(store), store, draft(attempt, 6), 1, 30)
    assert [ref.step for ref in Lineage(store).checkpoints()] == [6]


def test_failure_that_nobody_awaited_is_raised_by_the_next_save_once(tmp_path: Path) -> None:
    """Case 3: the failed step is never listed, the run may go on."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    writer = Writer(FaultyStore(store, [fail_before(on("create", "parts/", nth=0), StoreError("injected"))]), 0, 1)
    writer.save(attempt, 5, whole_of(some_tensors()))
    with pytest.raises(StoreError, match="injected"):
        writer.save(attempt, 6, whole_of(some_tensors()))
    writer.save(attempt, 7, whole_of(some_tensors())).wait(30)
    assert not list(store.list(keys.parts(draft(attempt, 5).ref)))


def test_save_is_pending_until_the_upload_ends(tmp_path: Path) -> None:
    gate = threading.Event()
    store = file_store(tmp_path)
    writer = Writer(FaultyStore(store, [delay(on("create", "objects/"), lambda: gate.wait(60))]), 0, 1)
    pending = writer.save(open_attempt(store), 5, whole_of(some_tensors()))
    assert not pending.done()
    with pytest.raises(OutsideError, match="within"):
        pending.wait(0.01)
    gate.set()
    pending.wait(30)
    assert pending.done()


def test_save_tensors_changed_right_after_it_returns_holds_the_values_of_the_call(tmp_path: Path) -> None:
    """Case 2: whether it returns after the copy, or the copy is waited for."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    writer = Writer(store, 0, 1)
    for step, is_begun in ((1, False), (2, True)):
        tensor = torch.full((3_000_000,), float(step))
        held = whole_of({"t": tensor})
        pending = writer.begin(attempt, step, held) if is_begun else writer.save(attempt, step, held)
        if is_begun:
            pending.wait_captured(30)
        tensor.fill_(-1.0)
        part = pending.wait(30)
        commit(Lineage(store), store, draft(attempt, step), 1, 30, expected={0: part})
        assert (load(store.url, step)["t"] == float(step)).all()
        assert pending.figures.num_bytes > tensor.nbytes and pending.figures.upload_s >= 0


def test_begun_save_returns_before_the_copy_which_is_waited_for_until_a_deadline(tmp_path: Path) -> None:
    """Case 2: begun, a save says by `wait_captured` when tensors may change."""
    store = file_store(tmp_path)
    writer = Writer(store, 0, 1)
    with writer._buffer._lock:
        pending = writer.begin(open_attempt(store), 5, whole_of(some_tensors()))
        with pytest.raises(OutsideError, match=r"capturing step 5 was not done within 0\.01 s"):
            pending.wait_captured(0.01)
    pending.wait_captured(30)
    pending.wait(30)


def test_failed_copy_is_raised_where_it_is_waited_for_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 3."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    writer = Writer(store, 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(writer._buffer, "_copy", lambda start, source: 1 // 0)
        pending = writer.begin(attempt, 5, whole_of(some_tensors()))
        with pytest.raises(ZeroDivisionError):
            pending.wait_captured(30)
    writer.save(attempt, 6, whole_of(some_tensors())).wait(30)
    assert not list(store.list(keys.parts(draft(attempt, 5).ref)))


def test_prepared_memory_serves_the_saves_that_follow(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    tensors = some_tensors()
    writer = Writer(store, 0, 1)
    writer.prepare(whole_of(tensors)).result(30)
    place = writer._buffer._bytes.data_ptr()
    for step in (5, 6):
        writer.save(attempt, step, whole_of(tensors)).wait(30)
    assert writer._buffer._bytes.data_ptr() == place


def test_save_of_large_and_strided_tensors_that_threads_copy_side_by_side_is_bit_equal(tmp_path: Path) -> None:
    """Case 2: tensors above one copied piece, unaligned in the buffer, of every type, and views of others."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    large = random_tensor((5_000_003,), torch.float32, 1)
    tensors = some_tensors() | {"a.large": large, "b.large": large[1:].double()}
    tensors |= {"c.columns": random_tensor((2000, 1500), torch.bfloat16, 2).t(), "d.every": large[::3]}
    save(store, attempt, 5, [whole_of(tensors)])
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    restore(store, Lineage(store).manifest(CheckpointRef(attempt, 5)), whole_of(found))
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_save_while_the_wall_clock_steps_back_and_forth_keeps_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    steps = itertools.cycle((0.0, 4e9))
    monkeypatch.setattr(time, "time", lambda: next(steps))
    part = Writer(store, 0, 1, deadline_s=30).save(attempt, 5, whole_of(some_tensors())).wait(30)
    commit(Lineage(store), store, draft(attempt, 5), 1, 30, expected={0: part})
    assert [ref.step for ref in Lineage(store).checkpoints()] == [5]


def test_save_past_its_deadline_fails_and_leaves_no_part(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    with pytest.raises(OutsideError, match="deadline"):
        Writer(store, 0, 1, deadline_s=-1).begin(attempt, 5, whole_of(some_tensors())).wait(30)
    assert list(store.list("a00000001/")) == []


def test_records_of_each_rank_reach_the_manifest(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    lineage = Lineage(store)
    writers = [Writer(store, rank, 2) for rank in range(2)]
    for rank, (writer, held) in enumerate(zip(writers, rows_of(some_tensors(), 2), strict=True)):
        writer.save(attempt, 5, held, lambda rank=rank: (lineage.records.put(attempt, rank, 1, 5, None, None),))
    manifest = commit(lineage, store, draft(attempt, 5), 2, 30)
    assert [ref.key for ref in manifest.records] == [
        f"a00000001/records/s00000001-s00000005-r{rank:08d}.safetensors" for rank in range(2)
    ]


def test_save_after_a_lost_reply_recognises_its_own_objects(tmp_path: Path) -> None:
    """Case 10: the very same save again, over objects that are there."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    tensors = some_tensors()
    first = Writer(store, 0, 1).save(attempt, 5, whole_of(tensors)).wait(30)
    assert Writer(store, 0, 1).save(attempt, 5, whole_of(tensors)).wait(30) == first
    with pytest.raises(OutsideError, match="two processes"):
        Writer(store, 0, 1).save(attempt, 5, whole_of(emptied(tensors))).wait(30)


def test_commit_without_all_parts_names_the_missing_ranks(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    Writer(store, 1, 3).save(attempt, 5, rows_of(some_tensors(), 3)[1]).wait(30)
    with pytest.raises(IncompleteCheckpoint, match=r"ranks 0, 2 within 0.05 s"):
        commit(Lineage(store), store, draft(attempt, 5), 3, 0.05)
    assert Lineage(store).checkpoints() == ()


def test_commit_waits_for_a_part_that_comes_late(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)

    def second_rank_saves() -> None:
        Writer(store, 1, 2).save(attempt, 5, rows_of(some_tensors(), 2)[1]).wait(30)

    polled = FaultyStore(store, [delay(on("list", "parts/", nth=2), second_rank_saves)])
    Writer(store, 0, 2).save(attempt, 5, rows_of(some_tensors(), 2)[0]).wait(30)
    commit(Lineage(store), polled, draft(attempt, 5), 2, 30)
    assert [call.operation for call in polled.calls[:3]] == ["list"] * 3
    assert [ref.step for ref in Lineage(store).checkpoints()] == [5]


def test_commit_of_boxes_that_leave_a_hole_or_overlap_is_refused(tmp_path: Path) -> None:
    whole = torch.zeros(4, 2)
    for number, (start, expected) in enumerate({3: "in no box", 1: "overlap"}.items()):
        store = file_store(tmp_path / str(number))
        attempt = open_attempt(store)
        layout = [
            [HeldTensor("model.t", (4, 2), Box((0, 0), (2, 2)), whole[:2])],
            [HeldTensor("model.t", (4, 2), Box((start, 0), (4 - start, 2)), whole[start:])],
        ]
        with pytest.raises(IncompleteCheckpoint, match=f"model.t: .*{expected}"):
            save(store, attempt, 5, layout)
        assert Lineage(store).checkpoints() == ()


def test_commit_with_a_missing_object_is_refused(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    Writer(store, 0, 1).save(attempt, 5, whole_of(some_tensors())).wait(30)
    key = "a00000001/s00000005/objects/00000000-00000000.safetensors"
    store.delete(key)
    with pytest.raises(IncompleteCheckpoint, match=f"{key} is missing"):
        commit(Lineage(store), store, draft(attempt, 5), 1, 30)


def test_commit_of_another_part_than_reported_is_refused(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    ref = Writer(store, 0, 1).save(attempt, 5, whole_of(some_tensors())).wait(30)
    other = {0: type(ref)(ref.key, ref.num_bytes, "xxh3:" + "0" * 32)}
    with pytest.raises(IncompleteCheckpoint, match="reported"):
        commit(Lineage(store), store, draft(attempt, 5), 1, 30, expected=other)


NURSERY = """
import os, sys
import torch
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from saved_job import file_store, open_attempt, rows_of, save

def say(text):
    os.write(1, f"{text}\\n".encode())

def victim(start):
    store = file_store(Path(sys.argv[1]))
    attempt = open_attempt(store)
    for step in range(start + 1, start + 100_000):
        save(store, attempt, step, rows_of({"t": torch.full((300_000,), float(step)), "u": torch.full((7,), step)}, 2))
        say(step)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        victim(int(line))
    say(f"pid {child}")
    os.waitpid(child, 0)
    say("dead")
"""


@pytest.mark.timeout(360)  # 20 processes in turn: 24 s idle, 105 s at load 14
def test_process_killed_while_saving_20_times_keeps_every_committed_checkpoint(tmp_path: Path) -> None:
    """Case 1: SIGKILL at random moments of a process that does nothing but save; each start opens the next attempt."""
    chance = random.Random(20)
    store = file_store(tmp_path)
    newest = 0
    command = [sys.executable, "-c", NURSERY, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        for _ in range(20):
            newest = _kill_one(nursery, newest, chance.uniform(0.0, 0.15))
            live = Lineage(store).checkpoints()
            assert live and live[-1].step in (newest, newest + 1)
            newest = live[-1].step
            found = load(store.url)
            assert (found["t"] == newest).all() and (found["u"] == newest).all() and found["t"].shape == (300_000,)
        assert nursery.stdin is not None
        nursery.stdin.close()
    manifests = [Lineage(store).manifest(ref) for ref in Lineage(store).checkpoints()]
    assert all(verify(store, manifest) == () for manifest in manifests[-40:])
    assert len(Lineage(store).attempts()) == 20


def _kill_one(nursery: subprocess.Popen[str], start: int, delay_s: float) -> int:
    """Has a victim started, kills it `delay_s` after its first commit; returns the last step it reported committed."""
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(f"{start}\n")
    nursery.stdin.flush()
    pid, last = 0, start
    timer: threading.Timer | None = None
    while (line := nursery.stdout.readline().strip()) != "dead":
        assert line, "the victims' parent died"
        if line.startswith("pid"):
            pid = int(line.split()[1])
        else:
            last = int(line)
        if timer is None and pid and last > start:
            timer = threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL))
            timer.start()
    return last


def test_reader_during_saves_is_never_disturbed(tmp_path: Path) -> None:
    """Case 15: loads while another thread saves; each load is a whole checkpoint."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    stop = threading.Event()
    save(store, attempt, 1, rows_of({"t": torch.full((50_000,), 1.0)}, 2))

    def keep_saving() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            save(store, attempt, step, rows_of({"t": torch.full((50_000,), float(step))}, 2))

    saver = threading.Thread(target=keep_saving)
    saver.start()
    seen = set()
    end = time.monotonic() + 60
    try:
        while len(seen) < 3 and saver.is_alive() and time.monotonic() < end:
            values = load(store.url)["t"]
            assert (values == values[0]).all()
            seen.add(float(values[0]))
    finally:
        stop.set()
        saver.join(30)
    assert len(seen) == 3 and not saver.is_alive()
    with pytest.raises(ObjectMissing):
        store.read("a00000001/s00000001/parts/00000002.json")
