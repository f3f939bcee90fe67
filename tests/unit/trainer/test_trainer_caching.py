"""The node's cache as a job file asks for it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from phalanx.core.digest import sha256, xxh3
from phalanx.core.errors import PhalanxError
from phalanx.objects import open_store
from phalanx.spec import parse_job
from phalanx.stream import Split, open_split
from phalanx.stream.manifest import ShardEntry, encode_manifest
from phalanx.trainer.caching import node_cache

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


def split(url: str) -> Split:
    """Three shards of 2 MB, by their manifest alone."""
    digest = xxh3(b"")
    store = open_store(url)
    entries = [ShardEntry(f"t-{k}", 1, 1, SHARD_TOKENS, digest, digest, digest) for k in range(3)]
    recipe: dict[str, object] = {}
    manifest = encode_manifest(
        entries, name="train", is_held_out=False, tokenizer_digest=sha256(b""), vocab_size=100, eos_id=0, recipe=recipe
    )
    store.create("manifest.json", manifest)
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
    """A block of two shards holds 4,000,000 bytes."""
    asked = job(cache_folder=str(tmp_path), cache_gib=float(np.nextafter(num_bytes / (1 << 30), 1)))
    if is_enough:
        assert node_cache(asked, [remote]) is not None
        return
    with pytest.raises(PhalanxError, match=r"cluster\.cache_gib.*block of 2 shards.*\(4,000,000 bytes\)") as error:
        node_cache(asked, [remote])
    assert "\n" not in str(error.value)
