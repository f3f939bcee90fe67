"""What retention decides from, and its decisions: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.lineage import Attempt, CheckpointRef, Link


@dataclass(frozen=True, slots=True)
class Policy:
    """What the job asks for.

    keep_latest: newest good regular checkpoints that stay; 0 keeps all live ones. keep_every: those whose step is a
    multiple of it stay too; 0 for none. keep_best: so many of the best by `best_by` stay too (`loss`, or the name of a
    metric in manifests); best_order: whether the least or the greatest is best. keep_speculative: speculative ones
    without a promotion that stay. healthy_steps: after one of them, for its promotion.
    """

    keep_latest: int = 0
    keep_every: int = 0
    keep_best: int = 0
    best_by: str = "loss"
    best_order: str = "min"
    keep_speculative: int = 1
    healthy_steps: int = 100


@dataclass(frozen=True, slots=True)
class Facts:
    """What is so at one moment.

    links: the live chain, oldest first. attempts: all. committed: checkpoints that have a manifest. damaged: those that
    cannot be restored, and why. pinned: with the reason given. forked: origins of jobs that have not copied them yet,
    with the job's name. used: what is being read, copied or written now, and by what.
    speculative: those of the committed that are. promoted: those of them that were found healthy. unhealthy: those that
    never will be, and why. measured: what the policy tells the best by, of those of which it is known.
    """

    links: tuple[Link, ...]
    attempts: tuple[Attempt, ...]
    committed: frozenset[CheckpointRef]
    damaged: Mapping[CheckpointRef, str] = field(default_factory=dict)
    pinned: Mapping[CheckpointRef, str] = field(default_factory=dict)
    forked: Mapping[CheckpointRef, str] = field(default_factory=dict)
    used: Mapping[CheckpointRef, str] = field(default_factory=dict)
    speculative: frozenset[CheckpointRef] = frozenset()
    promoted: frozenset[CheckpointRef] = frozenset()
    unhealthy: Mapping[CheckpointRef, str] = field(default_factory=dict)
    measured: Mapping[CheckpointRef, float] = field(default_factory=dict)

    @property
    def newest_attempt(self) -> int:
        """The attempt that is not superseded; 0 before the first."""
        return self.links[-1].attempt.number if self.links else 0

    def is_live(self, ref: CheckpointRef) -> bool:
        """Whether a checkpoint of that name is, or would be, on the live chain."""
        return any(link.attempt.number == ref.attempt and link.has_step(ref.step) for link in self.links)

    def live(self) -> tuple[CheckpointRef, ...]:
        """The committed checkpoints on the live chain, oldest first."""
        return tuple(sorted(ref for ref in self.committed if self.is_live(ref)))

    def good(self) -> tuple[CheckpointRef, ...]:
        """Those of the live ones that are not damaged, oldest first."""
        return tuple(ref for ref in self.live() if ref not in self.damaged)

    def last_promoted(self) -> CheckpointRef | None:
        """The newest good live checkpoint that was promoted: before a later verdict the last one that is known to be
        healthy.
        """
        return max((ref for ref in self.good() if ref in self.speculative and ref in self.promoted), default=None)

    def parents(self) -> dict[CheckpointRef, int]:
        """What the attempts on the live chain started from, and the newest attempt that did."""
        return {link.attempt.parent: link.attempt.number for link in self.links if link.attempt.parent is not None}


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a committed checkpoint stays, and why."""

    ref: CheckpointRef
    stays: bool
    why: str
