"""The reading plan: everything that fixes which tokens a job reads at which position, up to a horizon. A frozen value,
no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.stream.manifest import Split


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """What a rank needs, besides the split itself, to compute every batch.

    horizon: first window position that must not be read before the plan is renewed.
    """

    dataset_digest: str
    seed: int
    seq_len: int
    global_batch_size: int
    document_mask: bool
    shuffle_block_shards: int
    horizon: int

    def first_position(self, step: int) -> int:
        """Window position at which global batch `step` (counted from 0) starts."""
        return step * self.global_batch_size

    def check_within_horizon(self, first_position: int) -> None:
        """Asserts that the batch at `first_position` may be read under this plan."""
        last = first_position + self.global_batch_size
        assert last <= self.horizon, f"positions up to {last} lie past the plan's horizon {self.horizon}"


def plan_training(
    split: Split,
    *,
    seed: int,
    seq_len: int,
    global_batch_size: int,
    document_mask: bool,
    shuffle_block_shards: int,
    horizon: int,
) -> ReadingPlan:
    """The plan that trains on `split`; raises PhalanxError for a held-out split or sizes below 1."""
    refuse_held_out(split)
    sizes = {"seq_len": seq_len, "global_batch_size": global_batch_size, "shuffle_block_shards": shuffle_block_shards}
    for name, size in sizes.items():
        if size < 1:
            raise PhalanxError(name, value=size, expected="1 or more", remedy="change it in the job file")
    return ReadingPlan(split.digest, seed, seq_len, global_batch_size, document_mask, shuffle_block_shards, horizon)


def refuse_held_out(split: Split, where: str = "data.train") -> None:
    """Raises PhalanxError where `split` was set apart for evaluation."""
    if split.is_held_out:
        raise PhalanxError(
            where,
            value=split.url,
            expected="a training split",
            remedy=f"{split.name!r} was held out for evaluation: name the train folder here, this one as data.held_out",
        )
