"""The proof of `proof.py` for a job: its lineage against its training split, read a second time through plain
`webdataset`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.data.proof import Proof, ShardCache, TokenArray, prove
from phalanx.data.webdataset_reading import read_shard_with_webdataset
from phalanx.lineage import Lineage
from phalanx.spec import Job
from phalanx.stream.manifest import open_split
from phalanx.trainer.places import job_store, order_of, settings_at, store_at


def prove_job(job: Job, progress: Mapping[int, int] | None = None) -> Proof:
    """Checks the live chain of `job`; see `proof.prove`. progress: for each attempt the last step that it was seen to
    finish.
    """
    url = job.data.train
    train = store_at(job, url)
    split, settings = open_split(train), settings_at(job, url)

    def members(shard: int) -> Iterator[tuple[int, TokenArray]]:
        return enumerate(read_shard_with_webdataset(url, split.columns.names[shard], settings))

    return prove(
        Lineage(job_store(job)),
        ShardCache(members, num_shards=2 * job.data.shuffle_block_shards),
        seq_len=job.training.seq_len,
        epoch_tokens=split.num_tokens,
        global_batch_size=job.training.global_batch_size,
        segments_of=order_of(job, train, split).window,
        progress=progress,
    )
