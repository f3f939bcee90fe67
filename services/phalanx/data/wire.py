"""The service's values as messages and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.data.datasets import DatasetSplit, DatasetVersion
from phalanx.data.decisions import Action, Damage
from phalanx.lineage.plan import ReadingPlan, Spans

_ACTIONS: Final = {
    Action.SKIP: pb.DAMAGE_ACTION_SKIP,
    Action.STOP: pb.DAMAGE_ACTION_STOP,
    Action.RETRY: pb.DAMAGE_ACTION_RETRY,
}
_ACTION_OF: Final = {number: action for action, number in _ACTIONS.items()}


def version_message(version: DatasetVersion) -> pb.DatasetVersion:
    """As a message."""
    created = Timestamp()
    created.FromDatetime(datetime.fromisoformat(version.create_time))
    return pb.DatasetVersion(
        dataset=version.dataset,
        version=version.version,
        splits=[
            pb.DatasetSplit(
                name=split.name,
                url=split.url,
                digest=split.digest,
                num_documents=split.num_documents,
                num_tokens=split.num_tokens,
                num_shards=split.num_shards,
                num_bytes=split.num_bytes,
            )
            for split in version.splits
        ],
        tokenizer_digest=version.tokenizer_digest,
        vocab_size=version.vocab_size,
        create_time=created,
        owner=version.owner,
        request_id=version.request_id,
    )


def version_of(message: pb.DatasetVersion) -> DatasetVersion:
    """From a message."""
    return DatasetVersion(
        dataset=message.dataset,
        version=message.version,
        splits=tuple(
            DatasetSplit(
                name=split.name,
                url=split.url,
                digest=split.digest,
                num_documents=split.num_documents,
                num_tokens=split.num_tokens,
                num_shards=split.num_shards,
                num_bytes=split.num_bytes,
            )
            for split in message.splits
        ),
        tokenizer_digest=message.tokenizer_digest,
        vocab_size=message.vocab_size,
        create_time=message.create_time.ToDatetime(UTC).isoformat(timespec="milliseconds"),
        owner=message.owner,
        request_id=message.request_id,
    )


def plan_message(plan: ReadingPlan) -> pb.ReadingPlan:
    """As a message."""
    return pb.ReadingPlan(
        horizon_step=plan.horizon_step, zero_weight=_messages(plan.zero_weight), journal_digest=plan.journal_digest
    )


def plan_of(message: pb.ReadingPlan) -> ReadingPlan:
    """From a message."""
    spans = tuple((span.start, span.stop) for span in message.zero_weight)
    return ReadingPlan(message.horizon_step, spans, message.journal_digest)


def damage_message(damage: Damage) -> pb.Damage:
    """As a message."""
    return pb.Damage(
        shard=damage.shard,
        why=damage.why,
        action=_ACTIONS[damage.action],
        zero_weight=_messages(damage.zero_weight),
        attempt=damage.attempt,
        journal_entry=damage.journal_entry,
    )


def damage_from(message: pb.Damage) -> Damage:
    """From a message."""
    return Damage(
        shard=message.shard,
        why=message.why,
        action=_ACTION_OF[message.action],
        zero_weight=tuple((span.start, span.stop) for span in message.zero_weight),
        attempt=message.attempt,
        journal_entry=message.journal_entry,
    )


def _messages(spans: Spans) -> list[pb.Span]:
    return [pb.Span(start=start, stop=stop) for start, stop in spans]
