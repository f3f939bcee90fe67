"""The proof of `proof.py` for a job: its lineage against its training split, read a second time through plain
`webdataset`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.data.proof import Proof, ShardCache, TokenArray, prove
from phalanx.data.webdataset_reading import read_shard_with_webdataset
from phalanx.lineage import Lineage
from phalanx.objects import ObjectStore, StorageSettings
from phalanx.spec import Job
from phalanx.stream.manifest import Split, open_split
from phalanx.stream.members import ShardIndices
from phalanx.stream.order import Order


@dataclass(frozen=True, slots=True)
class JobData:
    """A job's lineage and the split that it trained on. train_url, settings: where webdataset reads that split."""

    lineage: Lineage
    train: ObjectStore
    train_url: str
    settings: StorageSettings | None


def prove_job(job: Job, data: JobData, progress: Mapping[int, int] | None = None) -> Proof:
    """Checks the live chain of `job`; see `proof.prove`. progress: for each attempt the last step that it was seen to
    finish.
    """
    split = open_split(data.train)
    order = Order(
        split,
        seed=job.training.seed,
        seq_len=job.training.seq_len,
        shuffle_block_shards=job.data.shuffle_block_shards,
        index_of=ShardIndices(data.train, split),
    )
    return prove(
        data.lineage,
        ShardCache(lambda shard: _members(data, split, shard), num_shards=2 * job.data.shuffle_block_shards),
        seq_len=job.training.seq_len,
        epoch_tokens=split.num_tokens,
        global_batch_size=job.training.global_batch_size,
        segments_of=order.window,
        progress=progress,
    )


def _members(data: JobData, split: Split, shard: int) -> Iterator[tuple[int, TokenArray]]:
    plain: Iterable[TokenArray] = read_shard_with_webdataset(data.train_url, split.columns.names[shard], data.settings)
    return iter(enumerate(plain))
