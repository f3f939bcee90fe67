"""The proof of `proof.py` for a job: its lineage against its training data, read a second time through plain
`webdataset`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from phalanx.data.job_tracing import reading_of
from phalanx.data.left_out import left_out_by
from phalanx.data.proof import Proof, ShardCache, TokenArray, prove
from phalanx.data.webdataset_reading import read_shard_with_webdataset
from phalanx.lineage import Lineage
from phalanx.spec import Job
from phalanx.stream.members import DamagedShard
from phalanx.stream.segments import NO_SEGMENTS, SegmentColumns
from phalanx.stream.sources import source_of_shards
from phalanx.trainer.places import job_store, settings_at

_LOG = logging.getLogger(__name__)


def prove_job(job: Job, progress: Mapping[int, int] | None = None) -> Proof:
    """Checks the live chain of `job`; see `proof.prove`. progress: for each attempt the last step that it was seen to
    finish. Raises PhalanxError where the job that was started has another identity than `job`.
    """
    lineage = Lineage(job_store(job))
    reading = reading_of(job, lineage.read_job())
    left_out = left_out_by(lineage)
    damaged, view = left_out.shards, reading.view_of(left_out.plan)

    def members(shard: int) -> Iterator[tuple[int, TokenArray]]:
        source = reading.sources[int(source_of_shards(reading.sources, np.array([shard]))[0])]
        name, url = source.split.columns.names[shard - source.first_shard], job.data.training[source.name].url
        try:
            yield from enumerate(read_shard_with_webdataset(url, name, settings_at(job, url)))
        except Exception as error:
            # Whatever the library says of a shard that the journal calls damaged: its windows can't be compared.
            if shard not in damaged:
                raise
            _LOG.warning("shard %s is damaged, as the journal says: %s", name, error)

    def segments_of(position: int) -> SegmentColumns | None:
        if position < view.mixture.start or (view.end is not None and position >= view.end):
            return NO_SEGMENTS
        number, window = (int(found[0]) for found in view.place(np.array([position])))
        source = reading.sources[number]
        try:
            segments = source.order.window(window)
        except DamagedShard as damage:
            if damage.shard not in damaged:
                raise
            return None
        return replace(segments, shard=segments.shard + source.first_shard)

    return prove(
        lineage,
        ShardCache(members, num_shards=2 * job.data.shuffle_block_shards * len(reading.sources)),
        seq_len=job.training.seq_len,
        epoch_tokens=[source.split.num_tokens for source in reading.sources],
        view=view,
        global_batch_size=job.training.global_batch_size,
        segments_of=segments_of,
        progress=progress,
        names=[source.name for source in reading.sources],
    )
