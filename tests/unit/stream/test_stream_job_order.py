"""The order that a job file asks for, with as many indices kept as its blocks need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stream_builders import numbered_documents, write_split

from phalanx.data.prepare.settings import PrepareSettings
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore
from phalanx.spec import parse_job
from phalanx.spec.data import Data
from phalanx.stream import WindowReader, open_split
from phalanx.stream.windows import DEFAULT_CACHE_BYTES
from phalanx.trainer.places import order_of

NUM_SHARDS, SEQ_LEN = 40, 16


def test_two_blocks_as_they_are_unless_set_fit_what_a_rank_holds() -> None:
    """The one that is read, and the next one on its way: of shards as they are prepared, of the smaller type of id."""
    block_bytes = Data().shuffle_block_shards * PrepareSettings().shard_tokens * np.dtype(np.uint16).itemsize
    assert 2 * block_bytes <= DEFAULT_CACHE_BYTES


def test_reading_an_epoch_in_blocks_of_twenty_shards_fetches_each_index_once(tmp_path: Path) -> None:
    store = FaultyStore(open_store(f"file://{tmp_path}"))
    write_split(store, numbered_documents([[30, 50, 20]] * NUM_SHARDS))
    split = open_split(store)
    tables = {
        "job": {"name": "wide", "storage": "memory://wide"},
        "model": {"preset": "tiny"},
        "data": {"train": store.url, "shuffle_block_shards": 20},
        "training": {"seq_len": SEQ_LEN, "steps": 1, "global_batch_size": 1},
        "optimizer": {"lr": 1e-3},
    }
    order = order_of(parse_job(tables), store, split)
    positions = np.arange(split.num_tokens // SEQ_LEN - 1).reshape(-1, 3)
    with WindowReader(store, split, order, True) as reader:
        for step in positions:
            reader.read(step)
    indices = [call.key for call in store.calls if call.operation == "read" and call.key.endswith("index.safetensors")]
    assert len(indices) == len(set(indices)) == NUM_SHARDS
