"""Control from object storage alone, for `phalanx run` and torchrun: rank 0 decides with the lineage, the others learn
it from rank 0.

Rank 0 opens the attempt, reads the journal whenever the horizon is renewed, and commits checkpoints in a background
thread. An order comes as a signal to any rank (SIGINT or SIGTERM: stop; SIGUSR1: checkpoint now) and takes effect at
the next step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PhalanxError
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
from phalanx.lineage.rollback import RollBack, leave_out, roll_back, roll_backs, too_new
from phalanx.lineage.wishes import Wishes, grant
from phalanx.objects import ObjectStore
from phalanx.snapshot.commit import commit
from phalanx.trainer.commits import Committed, Committing
from phalanx.trainer.control import Commit, Opening, Orders, Plan, Superseded
from phalanx.trainer.exchange import Exchange
from phalanx.trainer.orders import OrderBox

__all__ = [
    "DAMAGED_CHECKPOINT_KIND",
    "HORIZON_STEPS",
    "ZERO_WEIGHT_KINDS",
    "Proposal",
    "StorageControl",
    "damaged_checkpoints",
    "zero_weight_spans",
]


@dataclass(frozen=True, slots=True)
class Proposal:
    """With what rank 0 opens the attempt."""

    code_digest: str
    identity_digest: str
    placement: Mapping[str, Any]


class StorageControl:
    """`Control` over a lineage. store: rooted at the job. Ranks other than 0 touch storage only for what they read and
    write themselves. wishes: what operators may change while it runs, None for a job that has nothing of the kind;
    position_after: the first window behind a step.
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
        on_bad_shard: str = "stop",
        wishes: Wishes | None = None,
        position_after: Callable[[int], int] = int,
    ) -> None:
        self._lineage, self._store, self._exchange, self._proposal = lineage, store, exchange, proposal
        self._rank, self._world_size, self._deadline_s, self._report = rank, world_size, deadline_s, report
        self._on_bad_shard, self._wishes, self._position_after = on_bad_shard, wishes, position_after
        self._orders = OrderBox()
        self._attempt = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def open(self) -> Opening:
        """See `Control.open`."""
        opened = self._exchange.share(self._open, self._deadline_s)
        self._attempt = int(opened["attempt"])
        parent = opened["parent"]
        manifest = self._lineage.manifest(CheckpointRef(*parent)) if parent else None
        return Opening(self._attempt, manifest, Plan.from_json(opened["plan"]))

    def _open(self) -> Mapping[str, Any]:
        attempt = self._open_attempt()
        parent = [attempt.parent.attempt, attempt.parent.step] if attempt.parent else None
        return {
            "attempt": attempt.number,
            "parent": parent,
            "plan": self._plan(attempt.number, attempt.start_step).to_json(),
        }

    def _open_attempt(self) -> Attempt:
        """Opens from the newest checkpoint that is not known, and does not turn out, to be damaged, and that no steps
        went into which ranks went back behind; the windows of those are left out.
        """
        proposal, backs = self._proposal, roll_backs(self._lineage)
        avoid = set(damaged_checkpoints(self._lineage)) | too_new(self._lineage, backs)
        while True:
            try:
                attempt = self._lineage.open_attempt(
                    code_digest=proposal.code_digest,
                    identity_digest=proposal.identity_digest,
                    placement=proposal.placement,
                    avoid=avoid,
                )
                leave_out(self._lineage, attempt.number, ((back.begin, back.end) for back in backs), "roll-back")
                return attempt
            except DamagedObject as error:
                if error.checkpoint is None or error.checkpoint in avoid:
                    raise
                self._report("damage", checkpoint=str(error.checkpoint), why=str(error))
                avoid.add(error.checkpoint)

    def renew(self, step: int) -> Plan:
        """See `Control.renew`."""
        return Plan.from_json(self._exchange.share(lambda: self._renew(step), self._deadline_s))

    def _renew(self, step: int) -> dict[str, Any]:
        newest = self._lineage.newest_attempt()
        if newest is not None and newest.number > self._attempt:
            raise Superseded(
                f"attempt {self._attempt}",
                expected=f"to be the newest attempt of the job, but attempt {newest.number} has been opened since",
                remedy="another process runs this job: let it go on (nothing is lost), or stop it and run again",
            )
        return self._plan(self._attempt, step).to_json()

    def _plan(self, attempt: int, step: int) -> Plan:
        entries = self._lineage.journal(attempt)
        if self._wishes is not None and grant(
            self._lineage, self._wishes, attempt, entries, self._position_after(step)
        ):
            entries = self._lineage.journal(attempt)
        return Plan.of(reading_plan(entries, step))

    def refuse_parent(self, parent: Manifest, why: str) -> None:
        """See `Control.refuse_parent`. Any rank may find the damage; the first entry is enough."""
        report_damage(self._lineage, self._attempt, parent.ref, parent.loader.position, why)

    def report_shard(self, key: str, why: str, step: int) -> bool:
        """See `Control.report_shard`: nothing is decided here. Raises PhalanxError where the job wants more than to
        stop.
        """
        if self._on_bad_shard == "stop":
            return False
        raise PhalanxError(
            f"object {key} of the training data",
            value=why,
            expected="data that can be read: which windows it costs (recovery.on_bad_shard) the services alone decide",
            remedy="submit the job to the services, or put the object back as `phalanx data prepare` wrote it",
        ) from None

    def roll_back(self, first_step: int, last_step: int) -> bool:
        """See `Control.roll_back`: the next attempt finds it in this one's journal."""
        self._exchange.share(lambda: self._roll_back(first_step, last_step), self._deadline_s)
        return True

    def _roll_back(self, first_step: int, last_step: int) -> dict[str, Any]:
        begin, end = self._position_after(first_step - 1), self._position_after(last_step)
        roll_back(self._lineage, RollBack(self._attempt, first_step, last_step, begin, end))
        return {}

    def listen(self) -> None:
        """Takes orders as signals from now on; call in the main thread."""
        self._orders.listen()

    def give(self, order: Orders) -> None:
        """Adds an order; it takes effect at the next step boundary. Safe in a signal handler."""
        self._orders.give(order)

    def orders(self) -> Orders:
        """See `Control.orders`."""
        return self._orders.take()

    def commit(self, manifest: Manifest) -> Commit:
        """See `Control.commit`."""
        if self._rank != 0:
            return Committed()
        return Committing(self._pool.submit(self._commit, manifest), manifest)

    def _commit(self, manifest: Manifest) -> None:
        commit(self._lineage, self._store, manifest, self._world_size, self._deadline_s)
        self._report("committed", attempt=manifest.attempt, step=manifest.step)

    def close(self) -> None:
        """See `Control.close`."""
        self._pool.shutdown(wait=True)
