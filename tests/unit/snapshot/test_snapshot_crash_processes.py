"""Real deaths: SIGKILL right before every few system calls on files of a save, a restore, an opening and a collection;
and of a process that saves to S3.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from saved_job import file_store, open_attempt, rows_of, save
from support import checkpoints
from test_snapshot_crash import NEW, OBJECT_BYTES, OLD, require_bits, require_only_whole_checkpoints

from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.retention import Policy
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.objects import open_store

pytestmark = pytest.mark.timeout(300)
STRIDE, NO_DEATH = 8, 100_000
HERE = Path(__file__).parent
Nursery = subprocess.Popen[str]


@contextmanager
def started() -> Iterator[Nursery]:
    command = [sys.executable, str(HERE / "crash_nursery.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running
        assert running.stdin is not None
        running.stdin.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with started() as running:
        yield running


def ask(nursery: Nursery, action: str, number: int, url: str) -> str:
    """How the child that does it ended."""
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(f"{action} {number} {url}\n")
    nursery.stdin.flush()
    end = nursery.stdout.readline().strip()
    assert end in ("killed", "done"), end
    return end


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The root of a job with one checkpoint, of step 5."""
    folder = tmp_path / "saved"
    store = file_store(folder)
    save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
    return folder


def each_death(nursery: Nursery, action: str, job: Path) -> Iterator[tuple[str, Path]]:
    """Copies of the job in which the action was killed before every `STRIDE`th call, then one in which it went through.

    No temporary file is left once the copy was listed.
    """
    for number in itertools.count(1, STRIDE):
        folder = job.parent / f"{action}-{number}"
        shutil.copytree(job, folder)
        end = ask(nursery, action, number, folder.as_uri())
        list(file_store(folder).list())
        assert not list(folder.rglob(".*")), number
        yield f"{action} {number}", folder
        if end == "done":
            return


def test_save_killed_before_any_call_leaves_the_previous_checkpoint_or_both(nursery: Nursery, saved: Path) -> None:
    """Case 1."""
    outcomes = set()
    for where, folder in each_death(nursery, "save", saved):
        store = file_store(folder)
        live = Lineage(store).checkpoints()
        assert live in ((CheckpointRef(1, 5),), (CheckpointRef(1, 5), CheckpointRef(1, 10))), where
        outcomes.add(len(live))
        assert open_attempt(store) == 2
        require_only_whole_checkpoints(store, where)
        for ref in live:
            require_bits(store, ref, OLD if ref.step == 5 else NEW, where)
    assert outcomes == {1, 2}


@pytest.mark.parametrize("action", ["restore", "open"])
def test_reader_or_opener_killed_before_any_call_loses_nothing(nursery: Nursery, saved: Path, action: str) -> None:
    """Case 1."""
    before = {info.key: file_store(saved).read(info.key) for info in file_store(saved).list()}
    num_deaths = 0
    for where, folder in each_death(nursery, action, saved):
        store, num_deaths = file_store(folder), num_deaths + 1
        found = {info.key: store.read(info.key) for info in store.list()}
        assert {key for key in found if before.get(key) != found[key]} <= {keys.attempt(2)}, where
        assert found.keys() >= before.keys()
        assert open_attempt(store) == len(found) - len(before) + 2
    require_bits(store, CheckpointRef(1, 5), OLD, where)
    assert num_deaths > 2


def test_collection_killed_before_any_call_leaves_only_whole_checkpoints(nursery: Nursery, tmp_path: Path) -> None:
    """Case 1, 4: what is live restores, the records stay, the next pass takes the rest."""
    store = file_store(tmp_path / "job")
    checkpoints.open_attempt(store)
    for step in (2, 4, 6):
        checkpoints.save(store, CheckpointRef(1, step), 2, first_step=step - 1)
    checkpoints.write_parts(store, CheckpointRef(1, 3), 2, ranks=[1])
    counts = set()
    for where, folder in each_death(nursery, "collect", tmp_path / "job"):
        left = file_store(folder)
        live = Lineage(left).checkpoints()
        counts.add(len(live))
        assert live[-1] == CheckpointRef(1, 6) and all(checkpoints.restores(left, ref) for ref in live), where
        prune(left, Policy(keep_latest=1), dry_run=False, grace_s=0)
        assert {keys.checkpoint_of(info.key) for info in left.list() if not keys.retired_ref(info.key)} == {
            None,
            CheckpointRef(1, 6),
        }, where
        steps = sorted(step for rows, _ in Lineage(left).records.live() for step in rows.step.tolist())
        assert steps == list(range(1, 7)), where
    assert counts == {1, 2, 3}


def test_process_killed_while_saving_to_s3_leaves_the_previous_checkpoint_or_both(s3_prefix: str) -> None:
    """Case 1: at a few operations on the store, the last of them none."""
    with started() as nursery:  # with this test's environment, where the server's address is
        found = [live_after_death(nursery, f"{s3_prefix}/{number}", number) for number in (3, 11, NO_DEATH)]
    assert found == [1, 1, 2]


def live_after_death(nursery: Nursery, url: str, number: int) -> int:
    """How many checkpoints a job has whose second save was killed at that operation."""
    store = open_store(url)
    save(store, open_attempt(store), 5, rows_of(OLD, 2), OBJECT_BYTES)
    assert ask(nursery, "save", number, url) == ("done" if number == NO_DEATH else "killed"), number
    live = Lineage(store).checkpoints()
    open_attempt(store)
    require_only_whole_checkpoints(store, url)
    require_bits(store, CheckpointRef(1, 5), OLD, url)
    return len(live)
