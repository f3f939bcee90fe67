"""Where a job's things are and in which order it reads: the one place that turns a job file into stores and orders.
Free of torch, for commands and services too.
"""

from __future__ import annotations

from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.spec import Job
from phalanx.stream.manifest import Split
from phalanx.stream.members import OPEN_INDICES, ShardIndices
from phalanx.stream.order import Order


def settings_at(job: Job, url: str) -> StorageSettings:
    """How the job's `[storage]` says that the bucket of `url` is reached."""
    return StorageSettings(**job.storage_settings(url).model_dump())


def store_at(job: Job, url: str) -> ObjectStore:
    """The store at `url`, reached as the job's `[storage]` says."""
    return open_store(url, settings_at(job, url))


def job_store(job: Job) -> ObjectStore:
    """The store rooted at the job: `<job.storage>/projects/<project>/jobs/<name>/`."""
    return store_at(job, job.job.storage).within(f"projects/{job.job.project}/jobs/{job.job.name}/")


def order_of(job: Job, store: ObjectStore, split: Split, first_shard: int = 0) -> Order:
    """The order in which the job reads `split`, which lies at `store`; it keeps the indices of two blocks at least.
    first_shard: of a source among the shards of all, for telling damage.
    """
    block = job.data.shuffle_block_shards
    indices = ShardIndices(store, split, max(OPEN_INDICES, 2 * block + 2), first_shard)
    return Order(
        split,
        seed=job.training.seed,
        seq_len=job.training.seq_len,
        shuffle_block_shards=block,
        index_of=indices,
        indices_of=indices.many,
    )
