"""The service's values as messages and back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.core.errors import PhalanxError
from phalanx.data.datasets import DatasetParent, DatasetSplit, DatasetVersion
from phalanx.data.decisions import Action, Damage
from phalanx.lineage.plan_message import span_messages, spans_of

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
        parents=[pb.DatasetParent(dataset=p.dataset, version=p.version, digest=p.digest) for p in version.parents],
        input_digest=version.input_digest,
        recipe_digest=version.recipe_digest,
        digest=version.digest,
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
        parents=tuple(DatasetParent(p.dataset, p.version, p.digest) for p in message.parents),
        input_digest=message.input_digest,
        recipe_digest=message.recipe_digest,
    )


def weights_of(messages: Iterable[pb.SourceWeight]) -> dict[str, str]:
    """From messages; raises PhalanxError for a source named twice."""
    weights: dict[str, str] = {}
    for each in messages:
        if each.source in weights:
            raise PhalanxError(
                "weights", value=each.source[:100], expected="each source once", remedy="give it one weight"
            )
        weights[each.source] = each.weight
    return weights


def damage_message(damage: Damage) -> pb.Damage:
    """As a message."""
    return pb.Damage(
        shard=damage.shard,
        why=damage.why,
        action=_ACTIONS[damage.action],
        zero_weight=span_messages(damage.zero_weight),
        attempt=damage.attempt,
        journal_entry=damage.journal_entry,
        source=damage.source,
        windows=span_messages(damage.windows),
    )


def damage_from(message: pb.Damage) -> Damage:
    """From a message."""
    return Damage(
        shard=message.shard,
        why=message.why,
        action=_ACTION_OF[message.action],
        zero_weight=spans_of(message.zero_weight),
        attempt=message.attempt,
        journal_entry=message.journal_entry,
        source=message.source,
        windows=spans_of(message.windows),
    )
