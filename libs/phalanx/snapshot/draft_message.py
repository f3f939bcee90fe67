"""The draft of a manifest between a rank and whoever commits it, as the contract of the checkpoint service tells it."""

from __future__ import annotations

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.lineage import LoaderState, Manifest


def draft_message(draft: Manifest) -> pb.ManifestDraft:
    """What a rank knows of a manifest; its parts and records are read from storage by whoever commits it."""
    whole = {name: value for name, value in draft.schedule.items() if isinstance(value, int)}
    return pb.ManifestDraft(
        ref=pb.CheckpointRef(attempt=draft.attempt, step=draft.step),
        world_size=draft.world_size,
        identity_digest=draft.identity_digest,
        placement_digest=draft.placement_digest,
        code_digest=draft.code_digest,
        journal_digest=draft.journal_digest,
        loader_step=draft.loader.step,
        loader_position=draft.loader.position,
        integers=whole,
        reals={name: value for name, value in draft.schedule.items() if name not in whole},
        speculative=draft.speculative,
        metrics=draft.metrics,
    )


def draft_of(message: pb.ManifestDraft) -> Manifest:
    """The draft that a message means; nothing in it is checked."""
    return Manifest(
        attempt=message.ref.attempt,
        step=message.ref.step,
        world_size=message.world_size,
        identity_digest=message.identity_digest,
        placement_digest=message.placement_digest,
        code_digest=message.code_digest,
        journal_digest=message.journal_digest,
        loader=LoaderState(message.loader_step, message.loader_position),
        schedule={**message.integers, **message.reals},
        records=(),
        parts=(),
        speculative=message.speculative,
        metrics=dict(message.metrics),
    )
