"""Saves in the background: they hold the values of the moment, and count in the order in which they were called."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import blank, same, some_state, url_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.objects.faults import Fault, FaultyStore, fail_before, on
from phalanx.snapshot.dcp import PhalanxWriter, Saving, async_save, latest_step, load, save
from phalanx.snapshot.dcp.session import session_at

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TORCHS_OWN = StagingOptions(False, False, False, False)


def checkpoints(url: str) -> list[tuple[int, int]]:
    return [(ref.attempt, ref.step) for ref in Lineage(open_store(url)).checkpoints()]


class LateWriter(PhalanxWriter):
    """Its save's thread begins once `gate` is set."""

    gate: threading.Event

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert self.gate.wait(60)
        super().reset(checkpoint_id)


class OpeningWriter(PhalanxWriter):
    """Its save's thread sets `gate` once it has begun."""

    gate: threading.Event

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self.gate.set()


def two_writers(url: str, first: int = 1, second: int = 2) -> tuple[LateWriter, OpeningWriter]:
    """For two saves, of which the second's thread comes first."""
    late, opening = LateWriter(url, first), OpeningWriter(url, second)
    late.gate = opening.gate = threading.Event()
    return late, opening


def steps_of(url: str) -> dict[int, Any]:
    """What each live checkpoint holds under `step`."""
    found: dict[int, Any] = {}
    for _, step in checkpoints(url):
        state = blank(some_state())
        load(state, url, step)
        found[step] = state["step"]
    return found


def test_saves_of_torch_are_made_in_the_order_of_the_calls_whichever_thread_comes_first(tmp_path: Path) -> None:
    """And one after the other: on several ranks their messages would be mixed up otherwise."""
    url = url_of(tmp_path)
    session = session_at(url, None)
    session.store = store = FaultyStore(open_store(url))
    futures = [
        dcp.async_save(some_state() | {"step": number}, storage_writer=writer)
        for number, writer in enumerate(two_writers(url), 1)
    ]
    for future in futures:
        future.result(60)
    steps = [call.key.split("/")[1] for call in store.calls if call.key.startswith("a00000001/s")]
    assert steps == sorted(steps) and len(set(steps)) == 2
    assert checkpoints(url) == [(1, 1), (1, 2)] and steps_of(url) == {1: 1, 2: 2}


def test_saves_of_torch_with_its_own_stagers_count_in_the_order_of_the_writers(tmp_path: Path) -> None:
    """Then the writer hears of its save in the save's thread only; here the second is over before the first begins."""
    url, gate = url_of(tmp_path), threading.Event()
    late = LateWriter(url, 1)
    late.gate = gate
    first = dcp.async_save(some_state() | {"step": 1}, storage_writer=late, async_stager=DefaultStager(TORCHS_OWN))
    second = dcp.async_save(
        some_state() | {"step": 2}, storage_writer=PhalanxWriter(url, 2), async_stager=DefaultStager(TORCHS_OWN)
    )
    second.result(60)
    gate.set()
    first.result(60)
    with pytest.raises(PhalanxError, match="a step after 2, that this program has saved"):
        save(some_state(), url, step=1)
    assert latest_step(url) == 2 and checkpoints(url) == [(1, 1), (1, 2)] and steps_of(url) == {1: 1, 2: 2}


def test_save_whose_predecessor_failed_is_made(tmp_path: Path) -> None:
    """Wherever that one failed: in storage, or in the planner, of which a writer hears nothing."""
    url = url_of(tmp_path)
    session, store = session_at(url, None), open_store(url)
    session.store = FaultyStore(store, [fail_before(on("create", "s00000001/parts/"), OSError("disk on fire"))])
    late, opening = two_writers(url)
    first = dcp.async_save(some_state(), storage_writer=late)
    second = dcp.async_save(some_state(), storage_writer=opening)
    second.result(60)
    assert isinstance(first.exception(60), dcp.CheckpointException) and checkpoints(url) == [(1, 2)]
    late, opening = two_writers(url, 3, 4)
    first = dcp.async_save(some_state(), storage_writer=late, planner=_BrokenPlanner())
    dcp.async_save(some_state(), storage_writer=opening).result(60)
    assert "no plan" in str(first.exception(60)) and checkpoints(url) == [(1, 2), (1, 4)]


class _BrokenPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise RuntimeError("no plan")


def test_save_that_never_runs_holds_up_the_next_no_longer_than_its_deadline(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    PhalanxWriter(url, 1).stage(some_state())  # its writer is gone, so nothing will run
    save(some_state(), url, step=2, deadline_s=60)
    held = PhalanxWriter(url, 3)
    held.stage(some_state())
    with pytest.raises(OutsideError, match=r"the save before this one was not over within 0\.02 s"):
        save(some_state(), url, step=4, deadline_s=0.01)
    save(some_state(), url, step=4, deadline_s=60)
    assert checkpoints(url) == [(1, 2), (1, 4)]


def test_load_counts_for_the_saves_called_after_it_whenever_those_before_it_begin(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    save(some_state(), url, step=3)
    late = LateWriter(url, 5)
    late.gate = threading.Event()
    future = dcp.async_save(some_state(), storage_writer=late)
    load(blank(some_state()), url, 3)
    late.gate.set()
    future.result(60)
    assert checkpoints(url) == [(1, 3), (1, 5)]
    save(some_state(), url, step=4)
    assert checkpoints(url) == [(1, 3), (2, 4)]


def test_one_writer_makes_one_save_at_a_time(tmp_path: Path) -> None:
    url, writer = url_of(tmp_path), PhalanxWriter(url_of(tmp_path))
    futures = [
        dcp.async_save(some_state() | {"step": step}, storage_writer=writer, checkpoint_id=str(step))
        for step in range(1, 5)
    ]
    for future in futures:
        future.result(60)
    assert steps_of(url) == {1: 1, 2: 2, 3: 3, 4: 4}


def test_failure_is_logged_before_anybody_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A future wakes those who wait before it calls back."""
    future: Future[Any] = Future()
    gate = threading.Event()
    future.add_done_callback(lambda _: gate.wait(60))
    saving = Saving(7, PhalanxWriter(url_of(tmp_path), 7), future)
    breaks = threading.Thread(target=future.set_exception, args=(OSError("disk on fire"),))
    with caplog.at_level(logging.WARNING):
        breaks.start()
        with pytest.raises(OSError, match="disk on fire"):
            saving.result(60)
        assert "step 7" in caplog.text
        gate.set()
        breaks.join(60)
    assert caplog.text.count("step 7") == 1


def test_async_save_holds_the_values_of_the_moment(tmp_path: Path) -> None:
    """Case 2: everything is changed as soon as the call has returned."""
    url, state = url_of(tmp_path), some_state()
    before = some_state()
    for step in (1, 2):  # the second uses the first's memory
        saving = async_save(state, url, step=step)
        _change(state)
        assert saving.result(60) == CheckpointRef(1, step)
        found = blank(before)
        load(found, url, step)
        assert same(found, before)
        state = some_state()


@pytest.mark.parametrize("stager", [None, StagingOptions(False, False, False, False)])
def test_torch_async_save_holds_the_values_of_the_moment(tmp_path: Path, stager: StagingOptions | None) -> None:
    """Case 2: with our staging, and with torch's."""
    url, state = url_of(tmp_path), some_state()
    chosen: dict[str, Any] = {} if stager is None else {"async_stager": DefaultStager(stager)}
    futures = []
    for step in (1, 2):  # the second begins while the first may still be written
        futures.append(dcp.async_save(state, storage_writer=PhalanxWriter(url, step), **chosen))
        if stager is not None:
            futures[-1].result(60)  # torch's stager has one memory
        if step == 1:
            _change(state)
            state["name"] = "second"
    for future in futures:
        future.result(60)
    second, first = blank(state), blank(some_state())
    load(second, url)
    load(first, url, 1)
    assert same(first, some_state()) and same(second, state)


def test_async_save_to_another_process_is_refused(tmp_path: Path) -> None:
    """AsyncCheckpointerType.PROCESS sends the writer to its process as a pickle."""
    with pytest.raises(PhalanxError, match=r"AsyncCheckpointerType\.THREAD"):
        PhalanxWriter(url_of(tmp_path), 1).__reduce_ex__(4)


def test_async_save_that_fails_is_raised_by_the_next_save_and_never_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 3: and the run can go on: the step after it, or the same step again, is saved."""
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=1)
    session, store = session_at(url, None), open_store(url)
    session.store = FaultyStore(store, [fail_before(on("commit", "s00000002/"), OSError("disk on fire"))])
    with caplog.at_level(logging.WARNING):
        async_save(state, url, step=2)
        with pytest.raises(OutsideError, match="disk on fire"):
            save(state, url, step=3)
    told = [record.getMessage() for record in caplog.records if record.name == "phalanx.snapshot.dcp.saving"]
    assert told == ["saving the checkpoint of step 2 failed: write: OSError: disk on fire"]  # no traceback of torch's
    assert checkpoints(url) == [(1, 1)]
    session.store = store
    _change(state)
    assert save(state, url, step=2) == CheckpointRef(2, 2)
    assert save(state, url, step=3) == CheckpointRef(2, 3)
    assert checkpoints(url) == [(1, 1), (2, 2), (2, 3)]


def test_async_save_whose_failure_was_asked_for_is_not_raised_again(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    session, store = session_at(url, None), open_store(url)
    session.store = FaultyStore(store, [fail_before(on("create", "parts/"), OSError("disk on fire"))])
    saving = async_save(state, url, step=1)
    with pytest.raises(OutsideError, match="disk on fire"):
        saving.result(60)
    session.store = store
    save(state, url, step=2)
    assert checkpoints(url) == [(1, 2)]


def test_async_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    session, store = session_at(url, None), open_store(url)
    gate = threading.Event()
    session.store = FaultyStore(store, [_held(gate)])
    first = async_save(state, url, step=1)
    assert not first.done()
    with pytest.raises(OutsideError, match=r"step 1 was not done within 0\.01 s"):
        first.result(0.01)
    load_is_not_blocked = threading.Thread(target=latest_step, args=(url,))
    load_is_not_blocked.start()
    load_is_not_blocked.join(30)
    gate.set()
    second = async_save(state, url, step=2)
    assert first.done() and second.result(60).step == 2


def _change(state: Any) -> None:
    if isinstance(state, dict):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_() if value.dtype != torch.bool else value.logical_not_()
            elif isinstance(value, dict | list):
                _change(value)
            else:
                state[key] = 0
    elif isinstance(state, list):
        for value in state:
            _change(value)


def _held(gate: threading.Event) -> Fault:
    def wait(call: Any) -> None:
        assert gate.wait(60)

    return Fault(on("create", "s00000001/parts/"), before=wait)
