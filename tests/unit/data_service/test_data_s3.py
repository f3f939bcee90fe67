"""A dataset on S3: prepared, continued, read by windows and by plain webdataset, and damaged there."""

import uuid

import numpy as np
import pytest
from corpus_builders import SETTINGS, DyingStore, Killed, write_corpus
from support.ministack import make_bucket

from phalanx.data.prepare import prepare, source_of
from phalanx.data.verification import verify_split
from phalanx.data.webdataset_reading import read_shard_with_webdataset, read_with_webdataset
from phalanx.objects import StorageSettings, open_store
from phalanx.stream import DamagedShard, Order, ShardIndices, WindowReader, open_split


def test_dataset_on_s3_gives_the_same_bytes_windows_and_members(ministack, tmp_path):
    """Case 5 too: a shard cut on the server is named as damage, not read as a short one, and not waited for."""
    source, local = source_of(write_corpus(tmp_path / "corpus")), open_store(f"file://{tmp_path}/d")
    settings = StorageSettings(endpoint=ministack)
    bucket = make_bucket(ministack, f"bucket-{uuid.uuid4().hex[:12]}")
    remote = open_store(bucket, settings, deadline_s=20)
    with pytest.raises(Killed):
        prepare(source, DyingStore(remote, "d", [6]), SETTINGS)
    report = prepare(source, remote.within("d"), SETTINGS)
    assert report.train == prepare(source, local, SETTINGS).train
    train = remote.within("d/train")
    split = open_split(train)
    assert not any(check.damages for check in verify_split(train, split))
    order = Order(split, 0, 16, 2, ShardIndices(train, split))
    positions = np.arange(split.num_tokens // 16)
    with WindowReader(train, split, order, True) as reader:
        windows = reader.read(positions)
    here = local.within("train")
    with WindowReader(here, open_split(here), order, True) as reader:
        assert (reader.read(positions).tokens == windows.tokens).all()
    plain = [member.tokens.tolist() for member in read_with_webdataset(f"{bucket}/d/train", split, settings)]
    assert plain == [member.tokens.tolist() for member in read_with_webdataset(here.url, split)]
    name = split.shard(0).name
    assert next(read_shard_with_webdataset(f"{bucket}/d/train", name, settings)).tolist() == plain[0]
    cut = train.read(f"{name}.tar")[:700]
    train.delete(f"{name}.tar")
    train.create(f"{name}.tar", cut)
    with (
        WindowReader(train, split, order, True) as reader,
        pytest.raises(DamagedShard, match="the object has 700 bytes"),
    ):
        reader.read(positions)
