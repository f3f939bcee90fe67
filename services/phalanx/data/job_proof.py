"""The proof of `proof.py` for a job: its lineage against its training split, read a second time through plain
`webdataset`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from phalanx.data.left_out import left_out_by
from phalanx.data.proof import Proof, ShardCache, TokenArray, prove
from phalanx.data.webdataset_reading import read_shard_with_webdataset
from phalanx.lineage import Lineage
from phalanx.spec import Job
from phalanx.stream.manifest import open_split
from phalanx.stream.members import DamagedShard
from phalanx.stream.order import SegmentColumns
from phalanx.trainer.places import job_store, order_of, settings_at, store_at

_LOG = logging.getLogger(__name__)


def prove_job(job: Job, progress: Mapping[int, int] | None = None) -> Proof:
    """Checks the live chain of `job`; see `proof.prove`. progress: for each attempt the last step that it was seen to
    finish.
    """
    url = job.data.train
    train = store_at(job, url)
    split, settings = open_split(train), settings_at(job, url)
    lineage, order = Lineage(job_store(job)), order_of(job, train, split)
    damaged = left_out_by(lineage).shards

    def members(shard: int) -> Iterator[tuple[int, TokenArray]]:
        try:
            yield from enumerate(read_shard_with_webdataset(url, split.columns.names[shard], settings))
        except Exception as error:
            # Whatever the library says of a shard that the journal calls damaged: its windows can't be compared.
            if shard not in damaged:
                raise
            _LOG.warning("shard %s is damaged, as the journal says: %s", split.columns.names[shard], error)

    def segments_of(position: int) -> SegmentColumns | None:
        try:
            return order.window(position)
        except DamagedShard as damage:
            if damage.shard not in damaged:
                raise
            return None

    return prove(
        lineage,
        ShardCache(members, num_shards=2 * job.data.shuffle_block_shards),
        seq_len=job.training.seq_len,
        epoch_tokens=split.num_tokens,
        global_batch_size=job.training.global_batch_size,
        segments_of=segments_of,
        progress=progress,
    )
