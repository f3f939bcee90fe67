"""Temporary files of killed writers are removed; those of living, foreign or unknown writers never are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.objects import ObjectStore, StoreError, leftovers, open_store
from phalanx.objects.base import TEMPORARY_SUFFIX
from phalanx.objects.leftovers import here, sweep, temporary_name

# Holds an object half-written until it is told to commit.
WRITER = """
import sys
from phalanx.objects import open_store
with open_store(sys.argv[1]).writer("a/unfinished") as writer:
    writer.write(b"half")
    print("writing", flush=True)
    sys.stdin.readline()
    writer.commit()
"""


@contextmanager
def a_writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing `a/unfinished`."""
    command = [sys.executable, "-c", WRITER, f"file://{folder}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}")


def test_create_removes_what_a_killed_writer_left_but_not_a_living_ones(tmp_path: Path) -> None:
    with a_writer(tmp_path) as living, a_writer(tmp_path) as killed:
        assert len(temporary_files(tmp_path)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        open_store(f"file://{tmp_path}").create("a/other", b"")
        assert [path.name.split("-")[1] for path in temporary_files(tmp_path)] == [str(living.pid)]
        living.communicate("commit\n", 10)
    assert open_store(f"file://{tmp_path}").read("a/unfinished") == b"half"
    assert temporary_files(tmp_path) == []


def test_list_removes_what_a_killed_writer_left_where_nobody_writes_again(store: ObjectStore, tmp_path: Path) -> None:
    with a_writer(tmp_path) as process:
        list(store.list())
        assert len(temporary_files(tmp_path)) == 1
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert list(store.list()) == []
    assert temporary_files(tmp_path) == []


def named(place: str, pid: int, began: int) -> str:
    return f".{place}-{pid}-{began}-{'0' * 32}{TEMPORARY_SUFFIX}"


def test_is_dead_by_place_number_and_beginning() -> None:
    own = here()
    assert own is not None
    pid, began = map(int, temporary_name().split("-")[1:3])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert pid == os.getpid()
    assert not own.is_dead(named(own.place, pid, began))
    assert own.is_dead(named(own.place, pid, began - 1)), "the number was given to another process since"
    assert own.is_dead(named(own.place, gone.pid, began))
    assert not own.is_dead(named("0" * 32, gone.pid, began)), "of another host"
    assert not own.is_dead(f".{'0' * 32}{TEMPORARY_SUFFIX}"), "says nothing of its writer"
    assert not own.is_dead(f"mine{TEMPORARY_SUFFIX}")


@pytest.mark.parametrize("changed", ["boot", "namespace", "host"])
def test_place_differs_by_boot_namespace_and_host(
    changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = here()
    if changed == "boot":
        read = Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path: "other" if path.name == "boot_id" else read(path))
    elif changed == "namespace":
        (tmp_path / "pid").symlink_to("pid:[1]")
        monkeypatch.setattr(leftovers, "_NAMESPACES", tmp_path)
    else:
        names = os.uname()
        monkeypatch.setattr(os, "uname", lambda: os.uname_result((names[0], "other", *names[2:])))
    after = here()
    assert before is not None and after is not None
    assert before.place != after.place


def test_place_unknown_sweeps_nothing_and_writes_all_the_same(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = here()
    assert own is not None
    (tmp_path / named(own.place, os.getpid(), 1)).touch()
    monkeypatch.setattr(leftovers, "here", lambda: None)
    store.create("k", b"1")
    assert [info.key for info in store.list()] == ["k"]
    assert len(temporary_files(tmp_path)) == 1


def test_sweep_looks_at_so_many_names_at_most(tmp_path: Path) -> None:
    own = here()
    assert own is not None
    for began in range(1, 7):
        (tmp_path / named(own.place, os.getpid(), began)).touch()
    sweep(tmp_path, 4)
    assert len(temporary_files(tmp_path)) == 2


def test_create_sweeps_a_folder_once(store: ObjectStore, tmp_path: Path) -> None:
    own = here()
    assert own is not None
    for number in range(2):
        (tmp_path / named(own.place, os.getpid(), 1)).touch()
        store.create(f"k{number}", b"")
        assert len(temporary_files(tmp_path)) == number


def test_commit_of_a_writer_whose_file_vanished_is_an_error_and_no_object(store: ObjectStore, tmp_path: Path) -> None:
    with store.writer("k") as writer:
        writer.write(b"data")
        temporary_files(tmp_path)[0].unlink()
        with pytest.raises(StoreError):
            writer.commit()
    assert list(store.list()) == []
