"""A node's copy of a remote object: fetched once, whatever runs at the same time, breaks or is killed."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore
from phalanx.stream import node_copy
from phalanx.stream.node_copy import mapped_object

DATA = os.urandom(300_000)
DIGEST = sha256(DATA)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(node_copy, "CHUNK_BYTES", 100_000)


def remote():
    """A store whose objects are no files; it counts calls."""
    store = FaultyStore(open_store("memory://"))
    store.create("table", DATA)
    store.calls.clear()
    return store


def reads(store):
    return sum(call.operation == "read" for call in store.calls)


def get(store, folder, **options):
    return bytes(mapped_object(store, "table", len(DATA), DIGEST, folder, **options))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_node_copy_many_at_once_fetch_it_once(tmp_path):
    store, folder = remote(), tmp_path / "node" / "objects"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: get(store, folder), range(8)))
    assert set(found) == {DATA} and reads(store) == 3
    assert get(remote(), folder) == DATA and files(folder) == [f"{DIGEST[7:]}.object"]


def test_node_copy_damaged_file_is_fetched_anew(tmp_path):
    folder = tmp_path / "objects"
    assert get(remote(), folder) == DATA
    path = folder / f"{DIGEST[7:]}.object"
    for wrong in (b"", DATA[:-1], DATA[:-1] + bytes([DATA[-1] ^ 1])):
        path.chmod(0o600)
        path.write_bytes(wrong)
        store = remote()
        assert get(store, folder) == DATA and reads(store) == 3 and path.read_bytes() == DATA


def test_node_copy_object_that_is_not_what_it_should_be_is_asked_twice(tmp_path):
    store = FaultyStore(open_store("memory://"))
    store.create("table", DATA[:-1] + b"x")
    with pytest.raises(OutsideError, match=r"memory:///?table is damaged"):
        get(store, tmp_path / "objects")
    assert reads(store) == 6 and files(tmp_path / "objects") == []


@pytest.mark.parametrize("obstacle", ["file", "open to others"])
def test_node_copy_folder_that_cannot_be_used_costs_memory_and_a_warning(tmp_path, caplog, obstacle):
    folder = tmp_path / "objects"
    if obstacle == "file":
        folder.write_text("not a folder")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert get(remote(), folder) == DATA
    assert "no shared copy" in caplog.text


def test_node_copy_disk_that_is_full_costs_memory_and_a_warning(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        assert get(remote(), tmp_path / "objects") == DATA
    assert "No space left" in caplog.text and files(tmp_path / "objects") == []


@contextmanager
def folder_locked(folder):
    folder.mkdir(mode=0o700)
    file = os.open(folder, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(file)


def test_node_copy_lock_held_for_ever_is_waited_for_a_bounded_time(tmp_path):
    with folder_locked(tmp_path / "objects"):
        began = time.monotonic()
        assert get(remote(), tmp_path / "objects", lock_wait_s=0.2) == DATA
        assert 0.2 <= time.monotonic() - began < 10


HOLDER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_node_copy_holder_of_the_lock_that_is_killed_keeps_nobody_waiting(tmp_path):
    folder = tmp_path / "objects"
    folder.mkdir(mode=0o700)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, remote(), folder, lock_wait_s=600)
        holder.kill()
        assert waiting.result(30) == DATA
    assert holder.wait(30) == -signal.SIGKILL


def test_node_copy_least_used_are_removed_and_stay_readable_for_who_mapped_them(tmp_path, monkeypatch):
    monkeypatch.setattr(node_copy, "KEPT_FILES", 2)
    folder, store, held = tmp_path / "objects", FaultyStore(open_store("memory://")), []
    for number in range(4):
        data = DATA[number:]
        store.create(f"t{number}", data)
        held.append(mapped_object(store, f"t{number}", len(data), sha256(data), folder))
    assert len(files(folder)) == 2
    assert [bytes(each) for each in held] == [DATA[number:] for number in range(4)]


KILLED = """
    import signal, sys, os
    from pathlib import Path
    from phalanx.core.digest import sha256
    from phalanx.objects import open_store
    from phalanx.stream import node_copy

    data, folder, at = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), sys.argv[3]
    store = open_store("memory://")
    store.create("table", data)
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if at == "fetching":
        node_copy._put = die
    elif at == "writing":
        write = os.write
        os.write = lambda file, part: (write(file, part[:1000]), die())[0]
    elif at == "renaming":
        Path.replace = die
    elif at == "renamed":
        replace = Path.replace
        Path.replace = lambda *names: (replace(*names), die())
    node_copy.mapped_object(store, "table", len(data), sha256(data), folder)
"""


@pytest.mark.parametrize("at", ["fetching", "writing", "renaming", "renamed"])
def test_node_copy_killed_anywhere_the_next_start_works_and_leaves_one_file(tmp_path, at):
    """Case 9."""
    (tmp_path / "data").write_bytes(DATA)
    folder = tmp_path / "objects"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "data"), str(folder), at]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    store = remote()
    began = time.monotonic()
    assert get(store, folder) == DATA and time.monotonic() - began < 10
    if at == "renamed":
        assert reads(store) == 0
        other = DATA + b"1"
        store.create("other", other)
        mapped_object(store, "other", len(other), sha256(other), folder)
    assert all(name.endswith(".object") for name in files(folder))
