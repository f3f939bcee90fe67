"""Control from object storage alone, for `phalanx run` and torchrun: rank 0 decides with the lineage, the others learn
it from rank 0.

Rank 0 opens the attempt, reads the journal whenever the horizon is renewed, and commits checkpoints in a background
thread. An order comes as a signal to any rank (SIGINT or SIGTERM: stop; SIGUSR1: checkpoint now) and takes effect at
the next step boundary.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from types import FrameType
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage, Manifest
from phalanx.lineage.damage import report_damage
from phalanx.lineage.plan import (
    DAMAGED_CHECKPOINT_KIND,
    HORIZON_STEPS,
    ZERO_WEIGHT_KINDS,
    damaged_checkpoints,
    reading_plan,
    zero_weight_spans,
)
from phalanx.objects import ObjectStore
from phalanx.snapshot.commit import commit
from phalanx.trainer.control import Commit, Opening, Orders, Plan
from phalanx.trainer.exchange import Exchange

__all__ = [
    "DAMAGED_CHECKPOINT_KIND",
    "HORIZON_STEPS",
    "ORDER_SIGNALS",
    "ZERO_WEIGHT_KINDS",
    "Proposal",
    "StorageControl",
    "damaged_checkpoints",
    "zero_weight_spans",
]

ORDER_SIGNALS = {signal.SIGINT: Orders.STOP, signal.SIGTERM: Orders.STOP, signal.SIGUSR1: Orders.CHECKPOINT}


@dataclass(frozen=True, slots=True)
class Proposal:
    """With what rank 0 opens the attempt."""

    code_digest: str
    identity_digest: str
    placement: Mapping[str, Any]


class StorageControl:
    """`Control` over a lineage. store: rooted at the job. Ranks other than 0 touch storage only for what they read and
    write themselves.
    """

    def __init__(
        self,
        lineage: Lineage,
        store: ObjectStore,
        exchange: Exchange,
        proposal: Proposal,
        *,
        rank: int,
        world_size: int,
        deadline_s: float,
        report: Callable[..., None],
    ) -> None:
        self._lineage, self._store, self._exchange, self._proposal = lineage, store, exchange, proposal
        self._rank, self._world_size, self._deadline_s, self._report = rank, world_size, deadline_s, report
        self._is_stopped = False
        self._num_checkpoint_orders = self._num_checkpoints_taken = 0
        self._attempt = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def open(self) -> Opening:
        """See `Control.open`."""
        opened = self._exchange.share(self._open, self._deadline_s)
        self._attempt = int(opened["attempt"])
        parent = opened["parent"]
        manifest = self._lineage.manifest(CheckpointRef(*parent)) if parent else None
        return Opening(self._attempt, manifest, _plan(opened["plan"]))

    def _open(self) -> Mapping[str, Any]:
        attempt = self._open_attempt()
        parent = [attempt.parent.attempt, attempt.parent.step] if attempt.parent else None
        return {"attempt": attempt.number, "parent": parent, "plan": self._plan(attempt.number, attempt.start_step)}

    def _open_attempt(self) -> Attempt:
        """Opens from the newest checkpoint that is not known, and does not turn out, to be damaged."""
        proposal, avoid = self._proposal, set(damaged_checkpoints(self._lineage))
        while True:
            try:
                return self._lineage.open_attempt(
                    code_digest=proposal.code_digest,
                    identity_digest=proposal.identity_digest,
                    placement=proposal.placement,
                    avoid=avoid,
                )
            except DamagedObject as error:
                if error.checkpoint is None or error.checkpoint in avoid:
                    raise
                self._report("damage", checkpoint=str(error.checkpoint), why=str(error))
                avoid.add(error.checkpoint)

    def renew(self, step: int) -> Plan:
        """See `Control.renew`. Raises PhalanxError on rank 0 when a newer attempt of the job has been opened."""
        return _plan(self._exchange.share(lambda: self._renew(step), self._deadline_s))

    def _renew(self, step: int) -> dict[str, Any]:
        newest = self._lineage.newest_attempt()
        if newest is not None and newest.number > self._attempt:
            raise PhalanxError(
                f"attempt {self._attempt}",
                expected=f"to be the newest attempt of the job, but attempt {newest.number} has been opened since",
                remedy="another process runs this job: let it go on (nothing is lost), or stop it and run again",
            )
        return self._plan(self._attempt, step)

    def _plan(self, attempt: int, step: int) -> dict[str, Any]:
        plan = reading_plan(self._lineage.journal(attempt), step)
        return {
            "horizon_step": plan.horizon_step,
            "zero_weight": [list(span) for span in plan.zero_weight],
            "journal_digest": plan.journal_digest,
        }

    def refuse_parent(self, parent: Manifest, why: str) -> None:
        """See `Control.refuse_parent`. Any rank may find the damage; the first entry is enough."""
        report_damage(self._lineage, self._attempt, parent.ref, parent.loader.position, why)

    def listen(self) -> None:
        """Takes orders as signals from now on; call in the main thread."""
        for number in ORDER_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.give(ORDER_SIGNALS[signal.Signals(number)])

    def give(self, order: Orders) -> None:
        """Adds an order; it takes effect at the next step boundary. Safe in a signal handler: what this writes, nothing
        else does.
        """
        if Orders.STOP in order:
            self._is_stopped = True
        if Orders.CHECKPOINT in order:
            self._num_checkpoint_orders += 1

    def orders(self) -> Orders:
        """See `Control.orders`. STOP stays: a rank that was told to stop goes on saying so."""
        taken, self._num_checkpoints_taken = self._num_checkpoints_taken, self._num_checkpoint_orders
        checkpoint = Orders.CHECKPOINT if self._num_checkpoints_taken > taken else Orders.NONE
        return checkpoint | (Orders.STOP if self._is_stopped else Orders.NONE)

    def commit(self, manifest: Manifest) -> Commit:
        """See `Control.commit`."""
        if self._rank != 0:
            return _Committed()
        return _Committing(self._pool.submit(self._commit, manifest), manifest)

    def _commit(self, manifest: Manifest) -> None:
        commit(self._lineage, self._store, manifest, self._world_size, self._deadline_s)
        self._report("committed", attempt=manifest.attempt, step=manifest.step)

    def close(self) -> None:
        """See `Control.close`."""
        self._pool.shutdown(wait=True)


class _Committed:
    """What ranks other than 0 hold: they have nothing to wait for."""

    done = True

    def wait(self, deadline_s: float) -> None:
        """Returns at once."""


class _Committing:
    """A commit that rank 0 runs in its thread."""

    def __init__(self, future: Future[None], manifest: Manifest) -> None:
        self._future, self._manifest = future, manifest

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, deadline_s: float) -> None:
        """Raises what the commit raised, or OutsideError past the deadline."""
        try:
            self._future.result(timeout=deadline_s)
        except FutureTimeout as error:
            raise OutsideError(f"checkpoint {self._manifest.ref} was not committed within {deadline_s:g} s") from error


def _plan(fields: Mapping[str, Any]) -> Plan:
    return Plan(
        horizon_step=int(fields["horizon_step"]),
        zero_weight=tuple((int(start), int(stop)) for start, stop in fields["zero_weight"]),
        journal_digest=str(fields["journal_digest"]),
    )
