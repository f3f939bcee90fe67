"""Control beside an agent: train opened the attempt; plans and commits come from the services by way of the agent of
rank 0's node.

Rank 0 asks its agent over a Unix socket, and the others learn from rank 0, as under `StorageControl`. While a service
is away the agent waits with the call, and so do all ranks: at a horizon in the phase `plan`, behind a save in the phase
`commit`, both for `plan_s` at most. Orders come as a stream to rank 0, or as signals to any rank. Ranks other than 0
call the agent only to report damage. Ranks die with their agent, so a lost one is nothing that is waited for here.

gRPC is imported in the rank, by the rank that needs it: a fork server must never hold its threads. It takes a quarter
of a second, during which the ranks meet (`Agent.warm_up`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, Manifest
from phalanx.trainer.commits import Committed, Committing
from phalanx.trainer.control import Commit, Opening, Orders, Plan, Superseded
from phalanx.trainer.exchange import Exchange
from phalanx.trainer.orders import OrderBox

if TYPE_CHECKING:
    from phalanx.api.agent.v1 import rank_service_pb2 as pb
    from phalanx.api.agent.v1.rank_service_pb2_grpc import RankServiceStub
    from phalanx.api.data.v1 import data_service_pb2 as data_pb

IDEMPOTENT = ("Open", "Renew", "RefuseParent", "ReportShardDamage", "Commit", "FindShares")
DAMAGE_DEADLINE_S = 60.0
MARGIN_S = 5.0  # rank 0 tells its own error before others tire of waiting for it
REOPEN_S = 1.0
CLOSE_DEADLINE_S = 5.0
LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where the agent listens, and for whom the ranks speak. job: `projects/<p>/jobs/<uid>`."""

    socket: Path
    job: str
    attempt: int

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> AgentPlace:
        return AgentPlace(Path(fields["socket"]), str(fields["job"]), int(fields["attempt"]))


class Agent:
    """The rank's line to its agent, opened when first used. Raises Superseded for an attempt that is not the newest,
    PhalanxError for what the services refuse, OutsideError for what did not mend within a call's deadline.
    """

    def __init__(self, place: AgentPlace) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._stub: RankServiceStub | None = None
        self._close: Callable[[], None] = lambda: None

    def warm_up(self) -> None:
        """Imports what the first call needs, in a thread."""
        threading.Thread(target=self.stub, name="agent-import", daemon=True).start()

    def stub(self) -> RankServiceStub:
        """The client, made once."""
        with self._lock:
            if self._stub is None:
                from phalanx.api.agent.v1.rank_service_pb2_grpc import RankServiceStub
                from phalanx.rpc.unix import connect_unix

                channel = connect_unix(self.place.socket, idempotent=IDEMPOTENT)
                self._stub, self._close = RankServiceStub(channel), channel.close
            return self._stub

    def call(self, method: str, request: Any, deadline_s: float) -> Any:
        """One call; tried again until the deadline while the agent or a service behind it is away."""
        with refused_by_newer():
            return getattr(self.stub(), method)(request, timeout=deadline_s)

    def open(self, deadline_s: float) -> pb.OpenResponse:
        from phalanx.api.agent.v1 import rank_service_pb2 as pb

        answer: pb.OpenResponse = self.call("Open", pb.OpenRequest(**self._who), deadline_s)
        return answer

    def renew(self, step: int, deadline_s: float) -> data_pb.ReadingPlan:
        from phalanx.api.agent.v1 import rank_service_pb2 as pb

        answer: pb.RenewResponse = self.call("Renew", pb.RenewRequest(**self._who, step=step), deadline_s)
        return answer.plan

    def refuse_parent(self, parent: CheckpointRef, why: str) -> None:
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb

        ref = checkpoint_pb.CheckpointRef(attempt=parent.attempt, step=parent.step)
        self.call("RefuseParent", pb.RefuseParentRequest(**self._who, parent=ref, why=why), DAMAGE_DEADLINE_S)

    def report_shard(self, key: str, why: str, step: int) -> bool:
        """Whether the object is whole after all."""
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.api.data.v1 import data_service_pb2 as data_pb

        request = pb.ReportShardDamageRequest(**self._who, shard=key, why=why, step=step)
        answer: pb.ReportShardDamageResponse = self.call("ReportShardDamage", request, DAMAGE_DEADLINE_S)
        return answer.damage.action == data_pb.DAMAGE_ACTION_RETRY

    def commit(self, manifest: Manifest, deadline_s: float) -> None:
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.snapshot.draft_message import draft_message

        self.call("Commit", pb.CommitRequest(job=self.place.job, draft=draft_message(manifest)), deadline_s)

    def orders(self, stop: threading.Event) -> Iterator[tuple[int, Orders]]:
        """Number and meaning of each order of the attempt, once and in order, through broken connections, until `stop`.

        Raises Superseded.
        """
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.rpc.follow import follow

        meanings = {pb.RANK_ORDER_STOP: Orders.STOP, pb.RANK_ORDER_CHECKPOINT: Orders.CHECKPOINT}

        def start(after: int) -> Any:
            return self.stub().WatchOrders(pb.WatchOrdersRequest(**self._who, after=after))

        last = 0
        with refused_by_newer():
            while not stop.is_set():
                for told in follow(start, lambda order: order.number, last, stop=stop, longest_pause_s=REOPEN_S):
                    last = told.number
                    yield last, meanings.get(told.order, Orders.NONE)
                stop.wait(REOPEN_S)  # an agent that ends the stream by itself has no order yet

    @property
    def _who(self) -> dict[str, Any]:
        return {"job": self.place.job, "attempt": self.place.attempt}

    def close(self) -> None:
        """Ends the connection and every call on it."""
        with self._lock:
            self._close()


@contextmanager
def refused_by_newer() -> Iterator[None]:
    """The wire's word for a newer attempt becomes the trainer's own."""
    from phalanx.rpc import errors

    try:
        yield
    except errors.Superseded as error:
        raise Superseded(error.where, value=error.value, expected=error.expected, remedy=error.remedy) from error


def told_plan(message: data_pb.ReadingPlan) -> Plan:
    """A plan as the loop knows it."""
    from phalanx.lineage.plan_message import plan_of

    return Plan.of(plan_of(message))


class AgentControl:
    """`Control` by way of an agent. enter: tells the phase that this rank enters, with its step; all ranks tell the
    same ones. plan_s: how long services may be away.
    """

    def __init__(
        self,
        agent: Agent,
        lineage: Lineage,
        exchange: Exchange,
        *,
        rank: int,
        plan_s: float,
        enter: Callable[[str, int], None],
        report: Callable[..., None],
    ) -> None:
        self._agent, self._lineage, self._exchange = agent, lineage, exchange
        self._rank, self._plan_s, self._enter, self._report = rank, plan_s, enter, report
        self._signals, self._told = OrderBox(), OrderBox()
        self._superseded: Superseded | None = None
        self._closing = threading.Event()
        self._listener = threading.Thread(target=self._hear, name="orders", daemon=True)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def open(self) -> Opening:
        """See `Control.open`. A parent whose manifest is damaged is refused at once."""
        self._enter("plan", 0)
        opened = self._exchange.share(self._open, self._plan_s + MARGIN_S)
        self._enter("init", 0)
        if self._rank == 0:
            self._listener.start()
        attempt, parent = self._agent.place.attempt, opened["parent"]
        manifest = None if parent is None else self._parent(CheckpointRef(*parent))
        return Opening(attempt, manifest, Plan.from_json(opened["plan"]))

    def _open(self) -> dict[str, Any]:
        answer = self._agent.open(self._plan_s)
        parent = [answer.parent.attempt, answer.parent.step] if answer.HasField("parent") else None
        return {"parent": parent, "plan": told_plan(answer.plan).to_json()}

    def _parent(self, ref: CheckpointRef) -> Manifest:
        try:
            return self._lineage.manifest(ref)
        except DamagedObject as damage:
            self._report("damage", checkpoint=str(ref), why=str(damage))
            try:
                self._agent.refuse_parent(ref, str(damage))
            except OutsideError as error:
                LOG.warning("damage of %s is not in the journal, so the next attempt finds it anew: %s", ref, error)
            raise

    def renew(self, step: int) -> Plan:
        """See `Control.renew`. All ranks wait here together while services are away."""
        self._enter("plan", step + 1)
        answer = self._exchange.share(lambda: self._renew(step), self._plan_s + MARGIN_S)
        self._enter("step", step + 1)
        return Plan.from_json(answer)

    def _renew(self, step: int) -> dict[str, Any]:
        return told_plan(self._agent.renew(step, self._plan_s)).to_json()

    def refuse_parent(self, parent: Manifest, why: str) -> None:
        """See `Control.refuse_parent`."""
        self._agent.refuse_parent(parent.ref, why)

    def report_shard(self, key: str, why: str, step: int) -> bool:
        """See `Control.report_shard`. A report that is refused must not be told in the damage's place."""
        try:
            return self._agent.report_shard(key, why, step)
        except Superseded:
            raise
        except PhalanxError as error:
            LOG.warning("nothing is decided about the damage of %s: %s", key, error)
            return False

    def roll_back(self, first_step: int, last_step: int) -> bool:
        """See `Control.roll_back`: the monitor sees the same steps, and train acts."""
        return False

    def listen(self) -> None:
        """Takes orders as signals too from now on; call in the main thread."""
        self._signals.listen()

    def _hear(self) -> None:
        """Until closed; in a thread of rank 0."""
        try:
            for number, order in self._agent.orders(self._closing):
                LOG.info("order %d of the agent: %s", number, order.name)
                self._told.give(order)
        except Superseded as error:
            self._superseded = error
        except (PhalanxError, OutsideError) as error:
            if not self._closing.is_set():
                LOG.warning("orders of the agent are heard no more, only signals: %s", error)

    def orders(self) -> Orders:
        """See `Control.orders`. Raises Superseded as soon as the agent has said so."""
        if self._superseded is not None:
            raise self._superseded
        return self._signals.take() | self._told.take()

    def commit(self, manifest: Manifest) -> Commit:
        """See `Control.commit`."""
        if self._rank != 0:
            return Committed()
        return Committing(self._pool.submit(self._commit, manifest), manifest, least_s=self._plan_s + MARGIN_S)

    def _commit(self, manifest: Manifest) -> None:
        self._agent.commit(manifest, self._plan_s)
        self._report("committed", attempt=manifest.attempt, step=manifest.step)

    def close(self) -> None:
        """See `Control.close`."""
        self._pool.shutdown(wait=True)
        self._closing.set()
        self._agent.close()
        if self._listener.ident is not None:
            self._listener.join(CLOSE_DEADLINE_S)
