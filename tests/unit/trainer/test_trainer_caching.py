"""The node's cache as a job file asks for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.core.digest import sha256, xxh3
from phalanx.core.errors import PhalanxError
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore
from phalanx.spec import parse_job
from phalanx.stream import Split, open_split
from phalanx.stream.manifest import ShardEntry, encode_manifest, manifest_objects
from phalanx.trainer import forking, mixing, preflight, session
from phalanx.trainer.caching import copies_folder, node_cache

SHARD_TOKENS = 1_000_000


def job(**cluster):
    return parse_job(
        {
            "job": {"name": "cached", "storage": "memory://job"},
            "model": {"preset": "tiny"},
            "data": {"train": "s3://bucket/train", "shuffle_block_shards": 2},
            "training": {"seq_len": 16, "steps": 1, "global_batch_size": 1},
            "optimizer": {"lr": 1e-3},
            "cluster": cluster,
        }
    )


DIGEST = xxh3(b"")
ENTRIES = [ShardEntry(f"t-{k}", 1, 1, SHARD_TOKENS, DIGEST, DIGEST, DIGEST) for k in range(3)]
FACTS = {
    "name": "train",
    "is_held_out": False,
    "tokenizer_digest": sha256(b""),
    "vocab_size": 100,
    "eos_id": 0,
    "recipe": {},
}


def split(url: str) -> Split:
    """Three shards of 2 MB, by their manifest alone."""
    store = open_store(url)
    store.create("manifest.json", encode_manifest(ENTRIES, **FACTS))
    return open_split(store)


@pytest.fixture
def remote():
    return split("memory://split")


def test_node_cache_of_remote_data_lies_in_the_folder_that_the_job_names(tmp_path, remote):
    cache = node_cache(job(cache_folder=str(tmp_path / "pieces"), cache_gib=0.5), [remote])
    assert cache is not None and cache.folder == tmp_path / "pieces" and cache.max_bytes == 1 << 29


def test_node_cache_left_out_lies_below_the_folder_for_temporary_files(tmp_path, remote, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = node_cache(job(), [remote])
    assert cache is not None and cache.folder == tmp_path / f"phalanx-{os.getuid()}" / "pieces"
    assert cache.folder.stat().st_mode & 0o777 == 0o700 and cache.max_bytes == 8 << 30


def test_node_cache_of_local_data_or_of_no_size_is_none(tmp_path, remote):
    local = split(f"file://{tmp_path}/split")
    assert node_cache(job(cache_folder=str(tmp_path / "pieces")), [local]) is None
    assert node_cache(job(cache_folder=str(tmp_path / "pieces"), cache_gib=0.0), [remote]) is None
    assert not (tmp_path / "pieces").exists()


@pytest.mark.parametrize(("num_bytes", "is_enough"), [(4_000_000, True), (3_999_999, False)])
def test_node_cache_smaller_than_a_block_is_refused_with_the_figures(tmp_path, remote, num_bytes, is_enough):
    """Case 10. A block of two shards holds 4,000,000 bytes."""
    asked = job(cache_folder=str(tmp_path), cache_gib=float(np.nextafter(num_bytes / (1 << 30), 1)))
    if is_enough:
        assert node_cache(asked, [remote]) is not None
        return
    with pytest.raises(PhalanxError, match=r"cluster\.cache_gib.*block of 2 shards.*\(4,000,000 bytes\)") as error:
        node_cache(asked, [remote])
    assert "\n" not in str(error.value)


OPENERS = {
    "training sources": lambda job: mixing.JobReading.of(job, None, copies_folder(job)).sources[0].split,
    "check before the start": lambda job: preflight._split(job, "data.train", job.data.train),
    "reader of a rank": lambda job: session.reader_of(SimpleNamespace(job=job), job.data.train),
    "origin of a fork": lambda job: forking._tokens(limited(job), "train", None, {}, copies_folder(job)),
}


def limited(job):
    """A job whose only source runs out, so that its length counts."""
    source = SimpleNamespace(epochs=2.0, url=job.data.train)
    return SimpleNamespace(data=SimpleNamespace(training={"train": source}))


@pytest.fixture
def remote_table(tmp_path, monkeypatch):
    """All stores of a job are one whose manifest has its table in an object, and whose objects are no files."""
    store = FaultyStore(open_store("memory://split"))
    for key, data in manifest_objects(ENTRIES, **FACTS, inline_shards=2):
        store.create(key, data)
    for module in (mixing, preflight, session, forking):
        monkeypatch.setattr(module, "store_at", lambda job, url: store)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return store


def copies(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.object"))


@pytest.mark.parametrize("who", OPENERS)
def test_copy_of_a_table_lies_in_the_folder_that_the_job_names(tmp_path, remote_table, who):
    folder = tmp_path / "node" / "cache"
    OPENERS[who](job(cache_folder=str(folder)))
    (copy,) = copies(tmp_path)
    assert copy.parent == folder / "objects" and not (tmp_path / "temporary").exists()
    assert {each.stat().st_mode & 0o777 for each in (folder, copy.parent)} == {0o700}
    assert copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cluster", [{}, {"cache_folder": "/nowhere", "cache_gib": 0.0}])
def test_copy_of_a_table_without_a_cache_folder_lies_below_the_temporary_files(tmp_path, remote_table, cluster):
    mixing.training_splits(job(**cluster), copies_folder(job(**cluster)))
    (copy,) = copies(tmp_path)
    assert copy.parent == tmp_path / "temporary" / f"phalanx-{os.getuid()}" / "objects"


def test_copy_of_a_table_is_shared_through_a_link_to_the_cache_folder(tmp_path, remote_table, caplog):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    for _ in range(2):
        mixing.training_splits(job(), copies_folder(job(cache_folder=str(tmp_path / "link"))))
    assert len(copies(tmp_path / "disk")) == 1 and not caplog.records
    tables = [call for call in remote_table.calls if call.operation == "read" and call.key.startswith("shards.")]
    assert len(tables) == 1


def test_copies_beside_the_pieces_are_not_counted_or_evicted_as_such(tmp_path, remote_table):
    asked = job(cache_folder=str(tmp_path / "cache"), cache_gib=0.004)
    found = mixing.training_splits(asked, copies_folder(asked))
    cache = node_cache(asked, found.values())
    assert cache is not None and cache.used_bytes() == 0
    for name in ("ab-0-4000000", "cd-0-4000000"):
        cache.get(name, 4_000_000, lambda: bytes(4_000_000))
    assert cache.used_bytes() == 4_000_000 and len(copies(tmp_path / "cache")) == 1
