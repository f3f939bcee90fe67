"""The probe tells good stores from bad ones, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.weak_store import Overwriting

from phalanx.core.digest import BytesLike
from phalanx.objects import ObjectStore, StoreDenied, StoreError, open_store
from phalanx.objects.faults import FaultyStore, fail_before, on, short_read
from phalanx.objects.memory import MemoryStore
from phalanx.objects.probe import probe


class OverwritingWithEmpty(MemoryStore):
    """A store whose condition is dropped for empty objects."""

    def create(self, key: str, data: BytesLike) -> None:
        if not data:
            self.delete(key)
        super().create(key, data)


def test_probe_of_every_kind_is_full_and_leaves_nothing(store: ObjectStore) -> None:
    store.create("mine", b"")
    report = probe(store)
    assert report.promise == "full", report
    assert [check for check in report.checks if check.ok is False] == []
    assert report.ok("large objects in parts") is (True if store.url.startswith("s3:") else None)
    assert report.create_s > 0
    assert report.read_s > 0
    assert [info.key for info in store.list()] == ["mine"]


def test_probe_of_files_leaves_no_folder(tmp_path: Path) -> None:
    assert probe(open_store(f"file://{tmp_path}")).promise == "full"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Overwriting, OverwritingWithEmpty])
def test_probe_of_a_store_that_overwrites_is_single_writer(kind: type[MemoryStore]) -> None:
    """Checkpoint case 11."""
    store = kind()
    assert probe(store).promise == "single-writer"
    assert list(store.list()) == []


def test_probe_of_a_store_with_short_reads_is_unusable() -> None:
    report = probe(FaultyStore(MemoryStore(), [short_read(on("read", "first"), 10)]))
    assert report.promise == "unusable"
    assert report.ok("ranged reads") is False


def test_probe_of_a_store_that_refuses_raises_the_refusal() -> None:
    refusal = StoreDenied("here", expected="rights", remedy="ask")
    with pytest.raises(StoreDenied):
        probe(FaultyStore(MemoryStore(), [fail_before(on("create"), refusal)]))


def test_probe_that_fails_in_the_middle_still_cleans_up() -> None:
    inner = MemoryStore()
    with pytest.raises(StoreError):
        probe(FaultyStore(inner, [fail_before(on("create", "time/"), StoreError("broken"))]))
    assert list(inner.list()) == []
