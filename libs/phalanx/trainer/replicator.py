"""Copies of the state in the memory of nodes, between checkpoints: taken like a save, handed to this node's agent.

A copy is taken only where no rank has a save or a copy under way, so that its step records begin behind the newest
checkpoint that is committed. What every rank has handed over is sealed: all of them know it at the same step, by the
all-reduce in which they agree on everything else. A hand-over that fails is told in the log and left; training goes on.

The memory of a copy is used again. An agent that has taken a step over keeps that one and the sealed one, and no other:
so three memories go round, two of which it keeps while the third is filled. One of which that is not known (its
hand-over failed, or the answer was lost) waits for the next hand-over that succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from phalanx.core.box import HeldTensor
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import Manifest
from phalanx.snapshot import background
from phalanx.snapshot.parts import Part
from phalanx.snapshot.replica_share import Records, ReplicaCapture, ShareMemory, Taken

LOG = logging.getLogger(__name__)
MOST_MEMORIES = 3


class Keeper(Protocol):
    """The agent of this node."""

    def hand_over(
        self, taken: Taken, rank: int, sealed_step: int, draft: Manifest, deadline_s: float
    ) -> None:  # pragma: no cover - a protocol
        """Returns once the share lies whole with all who keep it. Raises PhalanxError, OutsideError."""


class Replicator:
    """Takes a copy every `interval` steps. held: asked for the live tensors. deadline_s: of a copy."""

    def __init__(
        self, keeper: Keeper, rank: int, held: Callable[[], Sequence[HeldTensor]], *, interval: int, deadline_s: float
    ) -> None:
        self._keeper, self._rank, self._held = keeper, rank, held
        self._interval, self._deadline_s = interval, deadline_s
        self._capture: ReplicaCapture | None = None
        self._handing: Future[None] | None = None
        self._step = self._sealed_step = 0
        self._kept: dict[int, ShareMemory] = {}  # by step; those that an agent may keep
        self._spare: list[ShareMemory] = []

    def due(self, step: int) -> bool:
        """Whether a copy is due after `step`."""
        return step % self._interval == 0

    @property
    def busy(self) -> bool:
        """Whether a copy of this rank is under way."""
        return self._handing is not None and not self._handing.done()

    @property
    def failed(self) -> bool:
        """Whether the last copy of this rank did not get to all who should keep it."""
        handing = self._handing
        return handing is not None and handing.done() and handing.exception() is not None

    def agreed(self, *, any_busy: bool, any_failed: bool) -> None:
        """What all ranks know now; each calls this with the same."""
        if not any_busy and not any_failed and self._handing is not None:
            self._sealed_step = self._step

    def take(self, draft: Manifest, records: Records) -> None:
        """Begins a copy of the state after the draft's step; the tensors must not change until `wait_captured` has
        returned.
        """
        head = Part(draft.attempt, draft.step, self._rank, draft.world_size, (), ())
        memory = self._spare.pop() if self._spare else ShareMemory()
        self._capture = capture = ReplicaCapture(head, self._held(), records, memory)
        self._step, sealed = draft.step, self._sealed_step
        self._kept[draft.step] = memory

        def hand() -> None:
            try:
                taken = capture.result.result(self._deadline_s)
                self._keeper.hand_over(taken, self._rank, sealed, draft, self._deadline_s)
            except (PhalanxError, OutsideError, OSError) as error:
                LOG.warning("step %d is not kept in memory: %s", draft.step, error)
                if not capture.result.done():
                    self._kept.pop(draft.step)  # something may still be put there
                self._leave_oldest(sealed)
                raise
            self._reuse(draft.step, sealed)

        self._handing = background.begin(hand, "replica-hand-over")

    def _reuse(self, *steps: int) -> None:
        """The agent keeps these steps alone."""
        for step in [each for each in self._kept if each not in steps]:
            self._spare.append(self._kept.pop(step))
        del self._spare[MOST_MEMORIES - len(steps) :]

    def _leave_oldest(self, sealed: int) -> None:
        """Hand-overs that fail in a row must not take ever more memory: of theirs the agent keeps the last alone."""
        while len(self._kept) > MOST_MEMORIES:
            del self._kept[min(step for step in self._kept if step != sealed)]

    def wait_captured(self) -> None:
        """Returns when the copy under way, if any, has copied the tensors, or could not: call it before they change.
        Raises OutsideError where it does neither in time.
        """
        capture, self._capture = self._capture, None
        if capture is None:
            return
        try:
            capture.captured.result(self._deadline_s)
        except TimeoutError as error:
            raise OutsideError(f"step {self._step} was not copied within {self._deadline_s:g} s") from error
        except OSError as error:
            LOG.warning("step %d is not kept in memory: %s", self._step, error)
