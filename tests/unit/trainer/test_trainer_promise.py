"""A store without a create-only put is told before a run starts, one that loses bytes is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.weak_store import Overwriting

from phalanx.core.digest import BytesLike
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectExists, ObjectStore, StoreDenied, open_store
from phalanx.objects.faults import FaultyStore, fail_before, on, short_read
from phalanx.objects.memory import MemoryStore
from phalanx.trainer.promise import is_create_only, require_writable, warnings_of


def test_create_only_store_is_found_quickly_and_left_as_it_was(s3_prefix: str) -> None:
    store = open_store(s3_prefix).within("projects/p/jobs/j/")
    assert warnings_of(store) == ()  # the first request of a process finds endpoint and credentials
    started_s = time.perf_counter()
    assert warnings_of(store) == ()
    assert time.perf_counter() - started_s < 2.0  # 0.013 s when idle; the bound allows for a busy machine
    assert list(store.list()) == []


@pytest.mark.parametrize("spares", [None, b"", b"second"])
def test_store_that_overwrites_anything_is_single_writer(spares: bytes | None) -> None:
    """Checkpoint case 11: what `phalanx run` tells before it starts."""
    store = Overwriting(spares)
    (warning,) = warnings_of(store)
    assert "single-writer" in warning and "bucket://overwriting" in warning
    assert list(store.list()) == []


def test_files_and_memory_are_not_tried(tmp_path: Path) -> None:
    for url in (tmp_path.as_uri(), "memory://"):
        watched = FaultyStore(open_store(url))
        assert warnings_of(watched) == () and watched.calls == []
        assert is_create_only(watched)


@pytest.mark.parametrize("kept", [".", "a", "a/b"])
def test_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    require_writable(open_store(f"file://{tmp_path}/a/b").within("projects/p/jobs/j/"))
    assert sorted(tmp_path.rglob("*")) == before and tmp_path.is_dir()


def test_folder_that_holds_objects_keeps_them(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri()).within("projects/p/jobs/j/")
    store.create("events/1.json", b"1")
    require_writable(store)
    assert [info.key for info in store.list()] == ["events/1.json"]


def test_place_that_takes_no_object_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for url in ("file:///proc/x", f"file://{tmp_path}/file", f"file://{tmp_path}/file/below"):
        with pytest.raises(StoreDenied, match="expected a folder"):
            require_writable(open_store(url).within("projects/p/jobs/j/"))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file"]


def test_other_stores_are_not_tried_twice() -> None:
    watched = FaultyStore(MemoryStore())
    require_writable(watched)
    assert watched.calls == []


def test_store_that_loses_bytes_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(PhalanxError, match="phalanx doctor"):
        is_create_only(FaultyStore(store, [short_read(on("read"), 2)]))
    assert list(store.list()) == []


def test_store_that_refuses_a_second_put_but_replaces_the_object_is_refused() -> None:
    class Lying(MemoryStore):
        def create(self, key: str, data: BytesLike) -> None:
            try:
                super().create(key, data)
            except ObjectExists:
                self.delete(key)
                super().create(key, data)
                raise

    with pytest.raises(PhalanxError, match="created"):
        is_create_only(Lying())


def test_rights_without_delete_are_enough() -> None:
    store: ObjectStore = FaultyStore(
        MemoryStore(), [fail_before(on("delete"), StoreDenied("here", expected="rights", remedy="ask"))]
    )
    assert is_create_only(store)
