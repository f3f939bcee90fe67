"""A node's cache: fetched once for all, bounded, safe to be killed in, and never trusted further than digests reach."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.stream import node_cache
from phalanx.stream.node_cache import PART, ROOM, NodeCache, _Entry

SIZE = 1000


def name(number: int, size: int = SIZE) -> str:
    return f"{number:032x}-0-{size}"


def content(number: int, size: int = SIZE) -> bytes:
    return bytes([number % 256]) * size


def never() -> bytes:
    raise AssertionError("it is there already")


def put(cache: NodeCache, number: int, size: int = SIZE) -> bytes:
    return bytes(cache.get(name(number, size), size, lambda: content(number, size)))


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "pieces", 10 * SIZE)


def test_get_fetches_a_piece_once_for_all_who_share_the_folder(cache):
    assert put(cache, 1) == content(1)
    other = NodeCache(cache.folder, cache.max_bytes)
    assert bytes(other.get(name(1), SIZE, never)) == content(1)
    assert [path.name for path in cache.folder.iterdir()] == [name(1)]


def test_get_past_the_bound_lets_go_what_was_used_longest_ago(cache):
    for number in range(10):
        put(cache, number)
        os.utime(cache.folder / name(number), ns=(number, number))
    cache.get(name(0), SIZE, never)
    put(cache, 10)
    put(cache, 11, 2 * SIZE)
    kept = {path.name for path in cache.folder.iterdir()}
    assert kept == {name(number) for number in (0, 4, 5, 6, 7, 8, 9, 10)} | {name(11, 2 * SIZE)}
    assert cache.used_bytes() == 10 * SIZE


def test_a_piece_that_is_let_go_stays_readable_for_who_has_it(cache):
    held = cache.get(name(0), SIZE, lambda: content(0))
    for number in range(1, 20):
        put(cache, number)
    assert not (cache.folder / name(0)).exists()
    assert bytes(held) == content(0)


def test_a_piece_larger_than_the_bound_is_served_and_not_kept(cache):
    put(cache, 1)
    assert put(cache, 2, 11 * SIZE) == content(2, 11 * SIZE)
    assert cache.used_bytes() <= cache.max_bytes and not list(cache.folder.glob(f"*{PART}"))


def test_many_threads_together_end_within_the_bound_and_get_what_they_asked_for(cache):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: put(cache, number % 37), range(400)))
    assert found == [content(number % 37) for number in range(400)]
    assert cache.used_bytes() <= cache.max_bytes and not list(cache.folder.glob(f"*{PART}"))


class FinishesMeanwhile(NodeCache):
    """Its folder is listed while another writer gives a part the name of its piece: that look sees neither."""

    finishing = ""

    def _listed(self):
        names = super()._listed()
        if self.finishing + PART in names:
            names.remove(self.finishing + PART)
            (self.folder / (self.finishing + PART)).rename(self.folder / self.finishing)
        return names

    def finishes(self, number: int) -> None:
        self.finishing = name(number)
        (self.folder / (self.finishing + PART)).write_bytes(content(number))


def test_a_piece_that_is_finished_while_room_is_made_counts(tmp_path):
    cache = FinishesMeanwhile(tmp_path / "pieces", 10 * SIZE)
    for number in range(9):
        put(cache, number)
    cache.finishes(20)
    assert put(cache, 30) == content(30)
    assert cache.used_bytes() == 10 * SIZE and (cache.folder / name(20)).exists()


def test_a_part_that_has_gone_frees_nothing(cache):
    """Seen by no look under its whole name, since it came after both."""
    put(cache, 1)
    assert not cache._let_go(_Entry(name(1) + PART, SIZE, 0, is_part=True))
    assert [path.name for path in cache.folder.iterdir()] == [name(1)]


ROOMY = 256 * 4 * SIZE  # a process reserves room for four pieces at a time


@pytest.fixture
def small_rooms(monkeypatch):
    """Room is reserved in caches as small as those of these tests."""
    monkeypatch.setattr(node_cache, "_LEAST_ROOM_BYTES", 0)


def fill(folder: Path, numbers: range) -> None:
    """Pieces that are there from before."""
    for number in numbers:
        (folder / name(number)).write_bytes(content(number))


class Looks(NodeCache):
    """Counts its looks through the folder, and what of the pieces lay there beyond the bound."""

    looks, beyond = 0, 0

    def _listed(self):
        self.looks += 1
        names = super()._listed()
        whole = sum(int(each.rsplit("-", 1)[1]) for each in names if not each.endswith((PART, ROOM)))
        self.beyond = max(self.beyond, whole - self.max_bytes)
        return names


def test_room_for_several_pieces_is_reserved_in_one_look(tmp_path, small_rooms):
    cache = Looks(tmp_path / "pieces", ROOMY)
    for number in range(40):
        put(cache, number)
    assert cache.looks == 2 * 40 / 4
    assert cache.used_bytes() == 40 * SIZE


def test_writers_with_room_of_their_own_stay_within_the_bound_together(tmp_path, small_rooms):
    caches = [Looks(tmp_path / "pieces", ROOMY) for _ in range(3)]
    fill(caches[0].folder, range(1000))
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lambda number: put(caches[number % 3], number) == content(number), range(1000, 1200)))
    assert all(cache.beyond <= 0 for cache in caches) and caches[0].used_bytes() <= ROOMY
    assert caches[0].used_bytes() > ROOMY - 256 * SIZE, "no more is let go than the room that is asked for"


def test_room_ends_with_the_cache_that_reserved_it(tmp_path, small_rooms):
    cache = NodeCache(tmp_path / "pieces", ROOMY)
    put(cache, 1)
    assert len(list(cache.folder.glob(f"*{ROOM}"))) == 1
    folder = cache.folder
    del cache
    gc.collect()
    assert [path.name for path in folder.iterdir()] == [name(1)]


def test_room_that_a_killed_process_had_reserved_is_let_go_for_pieces(tmp_path, small_rooms):
    folder = tmp_path / "pieces"
    reserves = f"""
import os, signal
from pathlib import Path
from phalanx.stream import node_cache
from phalanx.stream.node_cache import NodeCache
node_cache._LEAST_ROOM_BYTES = 0
cache = NodeCache(Path({str(folder)!r}), {ROOMY})
cache.get({name(1)!r}, {SIZE}, lambda: bytes({SIZE}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", reserves], check=False, timeout=60)
    (left,) = folder.glob(f"*{ROOM}")
    cache = NodeCache(folder, ROOMY)
    fill(folder, range(2, 1024))
    for number in range(1024, 1032):
        put(cache, number)
    assert not left.exists() and cache.used_bytes() > ROOMY - 16 * SIZE


FETCHES = """
import sys
from pathlib import Path
from phalanx.stream.node_cache import NodeCache
folder, log, count, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
cache = NodeCache(folder, 1 << 30)
def fetch(number):
    with open(log, "a") as file:
        file.write(f"{number}\\n")
    return bytes([number % 256]) * size
for number in range(count):
    assert bytes(cache.get(f"{number:032x}-0-{size}", size, lambda: fetch(number))) == bytes([number % 256]) * size
"""


def test_processes_that_want_the_same_pieces_at_once_fetch_each_once(tmp_path):
    arguments = [sys.executable, "-c", FETCHES, str(tmp_path / "pieces"), str(tmp_path / "log"), "40", "100000"]
    ranks = [subprocess.Popen(arguments) for _ in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(40))


HANGS = """
import sys, time
from pathlib import Path
from phalanx.stream.node_cache import NodeCache
cache = NodeCache(Path(sys.argv[1]), 1 << 30)
def fetch():
    part = Path(sys.argv[1]) / (sys.argv[2] + ".part")
    part.write_bytes(b"x" * 500)  # as far as it came
    print("claimed", flush=True)
    time.sleep(600)
cache.get(sys.argv[2], 1000, fetch)
"""


@pytest.fixture
def writer(cache):
    """A process that is in the middle of fetching piece 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(cache.folder), name(1)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_writer_that_is_killed_leaves_nothing_that_stops_the_next(cache, writer):
    """No lock outlives its process, and half a piece is never taken for a whole one."""
    writer.kill()
    writer.wait()
    assert (cache.folder / (name(1) + PART)).stat().st_size == 500
    started = time.monotonic()
    assert put(NodeCache(cache.folder, cache.max_bytes), 1) == content(1)
    assert time.monotonic() - started < 30
    assert [path.name for path in cache.folder.iterdir()] == [name(1)]


def test_what_a_killed_writer_left_of_a_piece_nobody_wants_is_let_go(cache, writer):
    writer.kill()
    writer.wait()
    for number in range(2, 30):
        put(cache, number)
    assert not list(cache.folder.glob(f"*{PART}"))


def test_who_waits_for_another_writer_takes_over_when_it_dies(cache, writer):
    threading.Timer(0.3, writer.kill).start()
    assert put(cache, 1) == content(1)
    assert writer.poll() is not None or writer.wait(10)


def test_a_writer_that_hangs_is_not_waited_for_too_long(cache, writer):
    impatient = NodeCache(cache.folder, cache.max_bytes, patience_s=0.2)
    assert put(impatient, 1) == content(1)
    assert not (cache.folder / name(1)).exists()


def test_a_writer_at_work_is_not_robbed_of_its_place(cache, writer):
    for number in range(2, 30):
        put(cache, number)
    assert (cache.folder / (name(1) + PART)).exists() and cache.used_bytes() <= cache.max_bytes


@pytest.mark.parametrize("damage", [b"", b"short", content(1) + b"more"])
def test_a_piece_of_another_size_is_fetched_again(cache, damage):
    put(cache, 1)
    (cache.folder / name(1)).write_bytes(damage)
    assert put(cache, 1) == content(1) and bytes(cache.get(name(1), SIZE, never)) == content(1)


def test_files_of_others_in_the_folder_are_left_alone(cache):
    (cache.folder / "notes.txt").write_text("mine")
    for number in range(30):
        put(cache, number)
    assert (cache.folder / "notes.txt").read_text() == "mine"


def test_a_fetch_that_fails_leaves_nothing_behind(cache):
    def fails() -> bytes:
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        cache.get(name(1), SIZE, fails)
    assert not list(cache.folder.iterdir())
    assert put(cache, 1) == content(1)


def test_a_full_disk_is_told_once_and_reading_goes_on(cache, monkeypatch, caplog):
    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert [put(cache, number) for number in range(3)] == [content(number) for number in range(3)]
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert not list(cache.folder.iterdir())


def test_a_folder_that_vanishes_is_told_and_reading_goes_on(cache, caplog):
    cache.folder.rmdir()
    assert put(cache, 1) == content(1) and len(caplog.records) == 1


def test_open_of_a_folder_that_is_a_file_names_the_key_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PhalanxError, match=r"cluster\.cache_folder") as error:
        NodeCache(tmp_path / "file" / "pieces", SIZE)
    assert "\n" not in str(error.value)


def test_require_more_than_the_bound_is_refused_with_the_figures(cache):
    cache.require(10 * SIZE, "a block")
    with pytest.raises(PhalanxError, match=r"cluster.cache_gib.*a block \(10,001 bytes\)"):
        cache.require(10 * SIZE + 1, "a block")


def test_require_more_than_the_disk_has_is_refused_with_the_figures(tmp_path):
    cache = NodeCache(tmp_path, 1 << 62)
    with pytest.raises(PhalanxError, match=r"at least 1,152,921,504,606,846,976 free bytes, found [0-9,]+: a block"):
        cache.require(1 << 60, "a block")
