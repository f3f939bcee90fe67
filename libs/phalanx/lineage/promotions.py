"""Promotions: create-only objects by which a speculative checkpoint counts as healthy. That one exists is all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from phalanx.lineage import keys
from phalanx.lineage.documents import encode_document
from phalanx.lineage.values import CheckpointRef
from phalanx.objects import ObjectExists, ObjectStore


@dataclass(frozen=True, slots=True)
class Promotion:
    """Why a checkpoint was promoted, for people to read."""

    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]
    why: str


def promote(store: ObjectStore, ref: CheckpointRef, why: str) -> bool:
    """Promotes the checkpoint of the job whose root `store` is; False where another did already."""
    try:
        store.create(keys.promoted(ref), encode_document(Promotion(ref.attempt, ref.step, why)))
    except ObjectExists:
        return False
    return True
