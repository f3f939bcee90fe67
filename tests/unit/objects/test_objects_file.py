"""What only files can get wrong: killed writers, permissions, folders, URL forms."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.objects import ObjectExists, ObjectStore, StoreDenied, StoreError, open_store, writeback
from phalanx.objects.base import TEMPORARY_SUFFIX

NUM_KILLS = 25
NOBODY = 65534

# Forks writers that create self-describing objects in a loop, and kills each at a random moment: of three, one from its
# start on, and two from their first object on, so that a busy machine lets them write too.
STORM = """
    import hashlib, os, random, signal, sys, time
    from phalanx.objects import open_store
    store = open_store(sys.argv[1])
    for child in range(int(sys.argv[2])):
        began, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            for number in range(10_000):
                payload = random.randbytes(random.randrange(300_000))
                digest = hashlib.sha256(payload).digest()
                if number % 2:
                    store.create(f"{child}/{number:05}", digest + payload)
                else:
                    with store.writer(f"{child}/{number:05}") as writer:
                        writer.write(digest)
                        writer.write(payload)
                        writer.commit()
                if number == 0:
                    os.write(begins, b"1")
        if child % 3:
            os.read(began, 1)
        os.close(began)
        os.close(begins)
        time.sleep(random.uniform(0.002, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def temporary_files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)}


def test_create_killed_at_random_moments_leaves_only_whole_objects(tmp_path: Path) -> None:
    result = run_python(STORM, f"file://{tmp_path}/store", str(NUM_KILLS))
    assert result.returncode == 0, result.stderr
    assert temporary_files(tmp_path), "no writer was killed in the middle of a write"
    store = open_store(f"file://{tmp_path}/store")
    objects = list(store.list())
    for info in objects:
        data = store.read(info.key)
        assert hashlib.sha256(data[32:]).digest() == data[:32], info
    assert len(objects) > NUM_KILLS / 2, "the storm wrote too little to mean anything"
    assert temporary_files(tmp_path) == set()


def test_create_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.create("a/b", b"1")
    with pytest.raises(ObjectExists):
        store.create("a/b", b"2")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


def test_root_is_created_with_the_first_object_only(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/x/y")
    assert list(store.list()) == []
    store.delete("nothing")
    assert not (tmp_path / "x").exists()
    store.create("k", b"")
    assert (tmp_path / "x/y/k").is_file()


def test_delete_removes_empty_folders_below_the_root(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/root")
    store.create("a/b/c", b"")
    store.create("a/d", b"")
    store.delete("a/b/c")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "d", "root"]
    store.delete("a/d")
    assert [path.name for path in tmp_path.rglob("*")] == ["root"]


def test_object_where_a_folder_is_and_below_an_object_are_refused(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.create("a/b", b"")
    with pytest.raises(StoreError, match="folder of other objects"):
        store.create("a", b"")
    with pytest.raises(StoreDenied, match="found a file"):
        store.create("a/b/c", b"")


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A folder that this user (root: that nobody) may look into but not write to, with one unreadable object."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "secret").write_bytes(b"1")
        (folder / "secret").chmod(0o000)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


def told_without_rights(act: Callable[[], object]) -> str:
    """What `act` is refused with in a child process without root's rights; its result if it is not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            os.write(writer, repr(act()).encode())
        except StoreDenied as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "create": lambda store: store.create("k", b""),
    "create below": lambda store: store.create("a/b", b""),
    "writer": lambda store: store.writer("k"),
    "read": lambda store: store.read("secret"),
    "delete": lambda store: store.delete("secret"),
}


@pytest.mark.parametrize("call", CALLS)
def test_permission_error_names_path_and_remedy(closed_folder: Path, call: str) -> None:
    store = open_store(f"file://{closed_folder}")
    told = told_without_rights(lambda: CALLS[call](store))
    assert str(closed_folder) in told
    assert "change its permissions" in told
    assert "\n" not in told


def test_relative_url_means_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("file://./a b%20c")
    store.create("k", b"")
    assert store.url == f"file://{tmp_path}/a b%20c"
    assert (tmp_path / "a b%20c/k").is_file()


@pytest.mark.parametrize(
    "url", ["runs", "/runs", "file:/runs", "file://runs", "file://", "gs://b/x", "s3://", "s3:///x"]
)
def test_other_urls_are_refused_in_one_line(url: str) -> None:
    with pytest.raises(StoreDenied, match="storage URL") as refusal:
        open_store(url)
    assert "\n" not in str(refusal.value)


def test_delete_is_durable_before_it_returns(tmp_path, monkeypatch):
    store, synced = open_store(f"file://{tmp_path}"), []
    store.create("a/b", b"x")
    store.create("a/c", b"x")
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    store.delete("a/b")
    assert synced == [str(tmp_path / "a")]


@pytest.mark.parametrize("folder", ["/proc", "/proc/none", "/proc/none/deeper"])
def test_create_where_the_file_system_takes_nothing_is_denied(folder: str) -> None:
    with pytest.raises(StoreDenied, match=f"{folder}.*: expected a folder that can be made and written"):
        open_store(f"file://{folder}").create("a/b", b"x")


@pytest.mark.parametrize("is_hinted", [True, False])
def test_create_of_several_strides_is_whole_with_and_without_the_hint_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hinted: bool
) -> None:
    hints: list[tuple[int, int]] = []
    real = writeback._call()

    def call(file: int, start: int, num_bytes: int) -> None:
        hints.append((start, num_bytes))
        if is_hinted:
            real(file, start, num_bytes)

    monkeypatch.setattr(writeback, "_call", lambda: call)
    store = open_store(tmp_path.as_uri())
    stride = writeback.STRIDE_BYTES
    data = memoryview(os.urandom(1 << 16) * ((2 * stride + (5 << 16)) >> 16))
    store.create("whole", data)
    with store.writer("streamed") as writer:
        for start in range(0, len(data), stride // 2):
            writer.write(data[start : start + stride // 2])
        writer.commit()
    assert store.read("whole") == data and store.read("streamed") == data
    assert hints == 2 * [(0, stride), (stride, stride)]


def test_listing_passes_over_links_that_lead_nowhere(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    for name in ("a", "m/b", "z"):
        store.create(name, b"1")
    for name, target in (("gone", "none"), ("through", "a/none"), ("m/gone", "none")):
        (tmp_path / name).symlink_to(target)
    assert [found.key for found in store.list()] == ["a", "m/b", "z"]
    assert list(store.children()) == ["a", "gone", "m/", "through", "z"]


@pytest.mark.parametrize("target", ["circle", ".", ".."])
def test_listing_names_a_link_that_leads_in_a_circle(tmp_path: Path, target: str) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.create("m/b", b"1")
    (tmp_path / "store" / "m" / "circle").symlink_to(target)
    with pytest.raises(StoreDenied, match=r"store/m/circle.*: expected no links that lead to each other or to a fold"):
        list(store.list())


def test_create_on_a_full_disk_names_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = open_store(f"file://{tmp_path}")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError) as raised:
        store.create("shards/a.tar", b"data")
    assert str(raised.value) == f"{tmp_path}/shards/a.tar: No space left on device"
    assert not list(tmp_path.iterdir())
