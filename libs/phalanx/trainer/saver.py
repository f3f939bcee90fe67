"""When and how a rank saves: capture and upload in the background, commit; one save in flight, and its failure ends the
attempt by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from phalanx.core.box import HeldTensor
from phalanx.lineage import LoaderState, Manifest
from phalanx.snapshot.writer import Figures, PendingSave, Writer
from phalanx.trainer.control import Commit, Control
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.replicator import Replicator

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every manifest of an attempt says besides step and loader: digests of identity, placement, code; the world's
    size.
    """

    attempt: int
    world_size: int
    identity_digest: str
    placement_digest: str
    code_digest: str


@dataclass(frozen=True, slots=True)
class Notes:
    """What one save says of itself in its manifest: whether it is speculative, and what was measured at its step."""

    speculative: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What a due save cost this rank. stall_s: all seconds for which training was blocked, the wait for the save before
    it and for the copy before the next update included. None where the save was left out.

    num_skipped: saves left out so far.
    """

    step: int
    num_skipped: int
    stall_s: float | None = None
    figures: Figures | None = None


@dataclass(slots=True)
class _Flight:
    """A save whose upload and commit go on."""

    step: int
    upload: PendingSave
    commit: Commit
    stall_s: float


class Saver:
    """Saves every `interval` steps and on order, and speculatively every `speculative_interval` steps in between (0:
    never). held: asked for the live tensors at each save.

    when_busy: with the last save still in flight a due one waits for it, or is left out (and counted in `num_skipped`).
    """

    def __init__(
        self,
        control: Control,
        writer: Writer,
        recorder: Recorder,
        stamp: Stamp,
        held: Callable[[], Sequence[HeldTensor]],
        *,
        interval: int,
        when_busy: Literal["wait", "skip"],
        deadline_s: float,
        start_step: int,
        speculative_interval: int = 0,
    ) -> None:
        self._control, self._writer, self._recorder, self._stamp, self._held = control, writer, recorder, stamp, held
        self._interval, self._when_busy, self._deadline_s = interval, when_busy, deadline_s
        self._speculative_interval = speculative_interval
        self._flight: _Flight | None = None
        self._blocked_s = 0.0
        self._costs: list[SaveCost] = []
        self.last_step = start_step
        self.num_skipped = 0

    def due(self, step: int) -> bool:
        """Whether `step` is one after which a checkpoint is taken."""
        return step % self._interval == 0 or self.is_speculative(step)

    def is_speculative(self, step: int) -> bool:
        """Whether a speculative checkpoint is due after `step`, and no regular one."""
        every = self._speculative_interval
        return every > 0 and step % every == 0 and step % self._interval != 0

    def check(self) -> None:
        """Raises the failure of the save in flight as soon as it is known; never blocks."""
        flight = self._flight
        if flight is not None and flight.upload.done():
            flight.upload.wait(self._deadline_s)
            if flight.commit.done:
                self._land(flight)

    @property
    def busy(self) -> bool:
        """Whether this rank has a save in flight."""
        self.check()
        return self._flight is not None

    def save(
        self, loader: LoaderState, journal_digest: str, schedule: dict[str, int | float], notes: Notes = Notes()
    ) -> None:
        """Takes the checkpoint of the state after `loader.step`; the tensors must not change until `wait_captured` has
        returned. Saving a step twice is one save.
        """
        if loader.step == self.last_step:
            return
        self.finish()
        with self._blocking():
            records = self._recorder.hand_over(loader.step)
            upload = self._writer.begin(self._stamp.attempt, loader.step, self._held(), records=records)
            draft = self._draft(loader, journal_digest, schedule, notes)
            self._flight = _Flight(loader.step, upload, self._control.commit(draft), 0.0)
            self.last_step = loader.step
        self._flight.stall_s, self._blocked_s = self._blocked_s, 0.0

    def copy(
        self,
        replicator: Replicator,
        loader: LoaderState,
        journal_digest: str,
        schedule: dict[str, int | float],
        metrics: Mapping[str, float],
    ) -> None:
        """Has a copy of the state after `loader.step` kept in memory; no rank may have a save in flight."""
        assert self._flight is None, "records of a copy begin behind a committed checkpoint"
        draft = self._draft(loader, journal_digest, schedule, Notes(metrics=metrics))
        replicator.take(draft, self._recorder.copied(loader.step))

    def wait_captured(self) -> None:
        """Returns when the save in flight, if any, has copied the tensors: call it before they change."""
        flight = self._flight
        if flight is not None and not flight.upload.captured.done():
            started = time.monotonic()
            flight.upload.wait_captured(self._deadline_s)
            flight.stall_s += time.monotonic() - started

    def skips(self, step: int, any_rank_busy: bool) -> bool:
        """Whether the save that is due after `step` is left out by policy; every rank must ask with the same value."""
        if any_rank_busy and self._when_busy == "skip":
            self.num_skipped += 1
            self._costs.append(SaveCost(step, self.num_skipped))
            _LOG.warning(
                "a checkpoint was due while the last one was still being written: left out (checkpoint.when_busy)"
            )
            return True
        return False

    def finish(self) -> None:
        """Waits until the save in flight, if any, is committed; raises what failed."""
        if self._flight is not None:
            with self._blocking():
                self._land(self._flight)

    def take_costs(self) -> list[SaveCost]:
        """What the saves cost that were committed or left out since the last call."""
        taken, self._costs = self._costs, []
        return taken

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Counts the time inside as a wait of training for the next save."""
        started = time.monotonic()
        yield
        self._blocked_s += time.monotonic() - started

    def _land(self, flight: _Flight) -> None:
        flight.upload.wait(self._deadline_s)
        flight.commit.wait(self._deadline_s)
        self._costs.append(SaveCost(flight.step, self.num_skipped, flight.stall_s, flight.upload.figures))
        self._flight = None

    def _draft(
        self, loader: LoaderState, journal_digest: str, schedule: dict[str, int | float], notes: Notes
    ) -> Manifest:
        stamp = self._stamp
        return Manifest(
            attempt=stamp.attempt,
            step=loader.step,
            world_size=stamp.world_size,
            identity_digest=stamp.identity_digest,
            placement_digest=stamp.placement_digest,
            code_digest=stamp.code_digest,
            journal_digest=journal_digest,
            loader=loader,
            schedule=schedule,
            records=(),
            parts=(),
            speculative=notes.speculative,
            metrics=notes.metrics,
        )
