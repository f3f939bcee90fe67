"""The launcher over agents that are there: what their streams said last, and orders on their way. No I/O of its own.

A stream is a `Session`. Reports are acknowledged in their order, each once what it told is safe: records when they were
taken and their attempt is recorded as running (`settle_start`), the end of a gang when the decision about its attempt
is recorded (`settle`). Nothing here outlives the process:
agents come back and say what they hold.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Cause
from phalanx.rpc.errors import FailedPrecondition, Unavailable
from phalanx.snapshot.replicas import Kept
from phalanx.train.decide import ShareEnd
from phalanx.train.launch.base import (
    Check,
    GangKey,
    GangState,
    HeldGang,
    Inventory,
    LogChunk,
    Node,
    Started,
    StartGang,
    To,
)
from phalanx.train.states import Preparation
from phalanx.train.wire import cause_of, end_of, held_of, inventory_of

LOG = logging.getLogger(__name__)
CHECK_DEADLINE_S, START_DEADLINE_S, END_MARGIN_S, ORDER_DEADLINE_S = 300.0, 120.0, 40.0, 30.0
ANSWER_MARGIN_S: Final = 30.0
RETURN_S: Final = 5.0  # an agent whose stream broke is waited for so long by who waits for its answer
KEPT_ORDERS: Final = 20_000

Send = Callable[[pb.ConnectResponse], None]


@dataclass(eq=False, slots=True)
class Session:
    """One open stream of an agent. send: puts a message on its way. close: ends the stream."""

    send: Send
    close: Callable[[], None]


@dataclass(slots=True)
class _Agent:
    """A node and the process of its agent that was heard last. taken: the last report that was taken. untold: reports
    that are taken and not acknowledged, with the gang whose end they tell. is_ending: whether it said that it ends.
    """

    node_id: str
    instance_id: str
    inventory: Inventory
    session: Session | None = None
    heard_s: float = 0.0
    gangs: dict[GangKey, HeldGang] = field(default_factory=dict)
    taken: int = 0
    untold: deque[tuple[int, GangKey | None]] = field(default_factory=deque)
    num_dropped: int = 0
    is_ending: bool = False
    taking: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Order:
    """An order, for one process of an agent. until_s: when no answer is expected any more."""

    to: To
    message: pb.Order
    until_s: float
    answer: pb.Answer | None = None


class Agents:
    """See `Launcher`; the other half is called by the server of the streams.

    on_records: takes what ranks said, before it is acknowledged; what it raises ends the stream, and the agent tells it
    again. is_settled: whether what the end of a gang leads to is recorded already. is_starting: whether it is still to
    be recorded that an attempt runs; what its ranks say is acknowledged after that. on_change: something is to be
    decided anew.
    """

    def __init__(
        self,
        on_records: Callable[[str, GangKey, Sequence[record_pb2.Record]], None],
        is_settled: Callable[[GangKey], bool],
        is_starting: Callable[[GangKey], bool],
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_records, self._on_change, self._clock = on_records, on_change, clock
        self._is_settled, self._is_starting = is_settled, is_starting
        self._changed = threading.Condition(threading.RLock())
        self._agents: dict[str, _Agent] = {}
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self._ends: dict[GangKey, dict[str, ShareEnd]] = {}
        self._starting: set[GangKey] = set()

    # What streams say.

    def hello(self, hello: pb.Hello, session: Session, lost_after_s: float) -> None:
        """An agent is there; its earlier stream, and the orders of an earlier process of it, are over."""
        with self._changed:
            known = self._agents.get(hello.node_id)
            if known is not None and known.session is not None:
                known.session.close()
            if known is None or known.instance_id != hello.instance_id:
                known = _Agent(hello.node_id, hello.instance_id, inventory_of(hello.inventory))
                self._agents[hello.node_id] = known
            known.inventory, known.session, known.heard_s = inventory_of(hello.inventory), session, self._clock()
            known.gangs = {held.key: held for held in map(held_of, hello.gangs)}
            session.send(pb.ConnectResponse(welcome=pb.Welcome(lost_after=_duration(lost_after_s))))
            for order in self._orders.values():
                if order.answer is None and order.to == To(known.node_id, known.instance_id):
                    session.send(pb.ConnectResponse(order=order.message))
            self._acknowledge(known)
        self._tell()

    def gone(self, node_id: str, session: Session) -> None:
        """A stream is over."""
        with self._changed:
            agent = self._agents.get(node_id)
            if agent is not None and agent.session is session:
                agent.session, agent.heard_s = None, self._clock()
        self._tell()

    def heard(self, node_id: str, session: Session, num_dropped: int | None = None, *, is_ending: bool = False) -> None:
        """An agent lives. is_ending: it said that this process of it begins nothing more."""
        with self._changed:
            agent = self._current(node_id, session)
            agent.heard_s = self._clock()
            if num_dropped is not None:
                agent.num_dropped = num_dropped
            agent.is_ending = agent.is_ending or is_ending

    def reported(self, node_id: str, session: Session, report: pb.Report) -> None:
        """Takes a report, once, whichever stream brings it first."""
        with self._changed:
            agent = self._current(node_id, session)
        with agent.taking:
            if report.number > agent.taken:
                self._take(agent, GangKey(report.job, report.attempt), report)
        with self._changed:
            self._acknowledge(agent)

    def _take(self, agent: _Agent, key: GangKey, report: pb.Report) -> None:
        if report.WhichOneof("report") == "records":
            self._on_records(agent.node_id, key, report.records.records)
        is_end = report.WhichOneof("report") == "gang_ended"
        with self._changed:
            awaits = not self._is_settled(key) if is_end else self._is_starting(key)
            if awaits and not is_end:
                self._starting.add(key)
            if awaits and is_end:
                self._ends.setdefault(key, {})[agent.node_id] = end_of(report.gang_ended)
            if is_end:
                agent.gangs.pop(key, None)
            agent.taken = report.number
            agent.untold.append((report.number, key if awaits else None))
        if is_end:
            self._tell()

    def answered(self, node_id: str, session: Session, answer: pb.Answer) -> None:
        """Takes the answer to an order."""
        with self._changed:
            agent = self._current(node_id, session)
            order = self._orders.get(answer.order_id)
            if order is None or order.answer is not None or order.to != To(agent.node_id, agent.instance_id):
                return
            order.answer = answer
            key = GangKey(order.message.job, order.message.attempt)
            is_over = node_id in self._ends.get(key, {}) or self._is_settled(key)
            if answer.WhichOneof("answer") == "gang_started" and not is_over:
                ranks = tuple(order.message.start_gang.ranks)
                agent.gangs[key] = HeldGang(key, ranks, GangState.RUNNING)
        self._tell()

    def _current(self, node_id: str, session: Session) -> _Agent:
        agent = self._agents[node_id]
        if agent.session is not session:
            raise Unavailable(f"node {node_id} has opened another stream")
        return agent

    def _acknowledge(self, agent: _Agent) -> None:
        number = 0
        while agent.untold and not (agent.untold[0][1] in self._ends or agent.untold[0][1] in self._starting):
            number, _ = agent.untold.popleft()
        if not agent.untold:
            number = agent.taken  # told again, in case the acknowledgement was lost with a stream
        if number and agent.session is not None:
            acknowledgement = pb.Acknowledgement(number=number)
            agent.session.send(pb.ConnectResponse(acknowledgement=acknowledgement))

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_change()

    # The launcher.

    def nodes(self) -> tuple[Node, ...]:
        """See `Launcher.nodes`."""
        with self._changed:
            now_s = self._clock()
            return tuple(_node(self._agents[name], now_s) for name in sorted(self._agents))

    def check(self, to: To, order: str, check: Check) -> Preparation | Cause | None:
        """See `Launcher.check`."""
        origin = None
        if check.origin is not None:
            origin = pb.ForkOrigin(**{**check.origin, "spec_json": json.dumps(check.origin["spec_json"])})
        prepare = pb.Prepare(spec_json=json.dumps(check.spec), world_size=check.world_size, origin=origin)
        message = _order(order, GangKey(check.job, 0), CHECK_DEADLINE_S)
        message.prepare.CopyFrom(prepare)
        answer = self._ask(to, message, CHECK_DEADLINE_S)
        if answer is None or isinstance(answer, Cause):
            return answer
        found = answer.prepared
        return Preparation(
            json.loads(found.arguments_json),
            found.identity_digest,
            found.code_digest,
            json.loads(found.placement_json),
            tuple(found.warnings),
        )

    def start_gang(self, to: To, order: str, start: StartGang) -> Started | Cause | None:
        """See `Launcher.start_gang`."""
        if order not in self._orders:
            message = _order(order, start.key, START_DEADLINE_S)
            message.start_gang.CopyFrom(
                pb.StartGang(
                    arguments_json=json.dumps(start.arguments),
                    world_size=start.world_size,
                    ranks=start.assignment.ranks,
                    rendezvous=start.rendezvous,
                    parent_attempt=start.parent.attempt if start.parent else 0,
                    parent_step=start.parent.step if start.parent else 0,
                    token=start.token,
                    code_digest=start.code_digest,
                    partner=start.partner,
                    holders=[pb.ShareHolder(address=each.address, ranks=each.ranks) for each in start.holders],
                )
            )
            self._ask(to, message, START_DEADLINE_S)
        return self.started(order)

    def started(self, order: str) -> Started | Cause | None:
        """See `Launcher.started`."""
        with self._changed:
            answer = self._answer(order)
        return Started(answer.gang_started.rendezvous) if isinstance(answer, pb.Answer) else answer

    def was_sent(self, order: str) -> bool:
        """See `Launcher.was_sent`."""
        with self._changed:
            return order in self._orders

    def end_gang(self, to: To, order: str, key: GangKey, grace_s: float, why: str, *, superseded: bool) -> None:
        """See `Launcher.end_gang`."""
        message = _order(order, key, grace_s + END_MARGIN_S)
        message.end_gang.CopyFrom(pb.EndGang(grace=_duration(grace_s), why=why, superseded=superseded))
        self._ask(to, message, grace_s + END_MARGIN_S)

    def give_orders(self, to: To, order: str, key: GangKey, *, stop: bool, checkpoint: bool) -> None:
        """See `Launcher.give_orders`."""
        message = _order(order, key, ORDER_DEADLINE_S)
        message.give_orders.CopyFrom(pb.GiveOrders(stop=stop, checkpoint=checkpoint))
        self._ask(to, message, ORDER_DEADLINE_S)

    def release(self, job: str) -> None:
        """See `Launcher.release`."""
        for node in self.nodes():
            if node.is_connected:
                message = _order(uuid.uuid4().hex, GangKey(job, 0), ORDER_DEADLINE_S)
                message.release_job.CopyFrom(pb.ReleaseJob())
                self._ask(To(node.node_id, node.instance_id), message, ORDER_DEADLINE_S)

    def ends(self, key: GangKey) -> Mapping[str, ShareEnd]:
        """See `Launcher.ends`."""
        with self._changed:
            return dict(self._ends.get(key, {}))

    def settle(self, key: GangKey) -> None:
        """See `Launcher.settle`."""
        with self._changed:
            self._ends.pop(key, None)
        self.settle_start(key)

    def settle_start(self, key: GangKey) -> None:
        """See `Launcher.settle_start`."""
        with self._changed:
            self._starting.discard(key)
            for agent in self._agents.values():
                if agent.untold:
                    self._acknowledge(agent)

    def stacks(self, to: To, key: GangKey, ranks: Collection[int], deadline_s: float) -> Mapping[int, str]:
        """See `Launcher.stacks`."""
        message = _order(uuid.uuid4().hex, key, deadline_s)
        message.take_stacks.CopyFrom(pb.TakeStacks(ranks=ranks))
        return dict(self._await(to, message, deadline_s).stacks.stacks)

    def read_log(self, to: To, key: GangKey, rank: int, offset: int, max_bytes: int, deadline_s: float) -> LogChunk:
        """See `Launcher.read_log`."""
        message = _order(uuid.uuid4().hex, key, deadline_s)
        message.read_log.CopyFrom(pb.ReadLog(rank=rank, offset=offset, max_bytes=max_bytes))
        chunk = self._await(to, message, deadline_s).log_chunk
        return LogChunk(chunk.data, chunk.offset, chunk.complete)

    def kept_shares(self, to: To, job: str, deadline_s: float) -> tuple[Kept, ...]:
        """See `Launcher.kept_shares`."""
        message = _order(uuid.uuid4().hex, GangKey(job, 0), deadline_s)
        message.list_shares.CopyFrom(pb.ListShares())
        shares = self._await(to, message, deadline_s).kept_shares.shares
        return tuple(Kept(CheckpointRef(each.attempt, each.step), each.rank, each.world_size) for each in shares)

    def store_shares(self, to: To, key: GangKey, step: int, deadline_s: float, *, commit: bool) -> None:
        """See `Launcher.store_shares`."""
        message = _order(uuid.uuid4().hex, key, deadline_s)
        message.store_shares.CopyFrom(pb.StoreShares(step=step, commit=commit))
        self._await(to, message, deadline_s)

    # Orders.

    def _ask(self, to: To, message: pb.Order, deadline_s: float) -> pb.Answer | Cause | None:
        """Sends the order unless it was sent; its answer, where that is there."""
        with self._changed:
            if message.id not in self._orders:
                self._orders[message.id] = _Order(to, message, self._clock() + deadline_s + ANSWER_MARGIN_S)
                self._forget_oldest()
                agent = self._agents.get(to.node_id)
                if agent is not None and agent.session is not None and agent.instance_id == to.instance_id:
                    agent.session.send(pb.ConnectResponse(order=message))
            return self._answer(message.id)

    def _answer(self, order_id: str) -> pb.Answer | Cause | None:
        order = self._orders.get(order_id)
        if order is None:
            return None
        if order.answer is not None:
            if order.answer.WhichOneof("answer") == "failure":
                return cause_of(order.answer.failure.cause)
            return order.answer
        agent = self._agents.get(order.to.node_id)
        if agent is not None and agent.instance_id != order.to.instance_id:
            return Cause("node_loss", "its agent was started anew", node_id=order.to.node_id)
        if self._clock() >= order.until_s:
            return Cause("error", "the agent gave no answer", node_id=order.to.node_id)
        return None

    def _await(self, to: To, message: pb.Order, deadline_s: float) -> pb.Answer:
        """The answer to an order of the moment, which is forgotten then. Raises PhalanxError and OutsideError."""
        try:
            with self._changed:
                answer = self._ask(to, message, deadline_s)
                ends_s = self._clock() + deadline_s
                while answer is None and (left_s := min(ends_s, self._gone_s(to)) - self._clock()) > 0:
                    self._changed.wait(left_s)
                    answer = self._answer(message.id)
                is_gone = self._gone_s(to) <= self._clock()
        finally:
            with self._changed:
                self._orders.pop(message.id, None)
        if answer is None and is_gone:
            raise OutsideError(f"node {to.node_id} is gone: its stream ended {RETURN_S:g} s ago")
        if answer is None:
            raise OutsideError(f"node {to.node_id} gave no answer within {deadline_s:g} s")
        if isinstance(answer, pb.Answer):
            return answer
        if answer.kind == "user_error":
            raise FailedPrecondition(
                f"node {to.node_id}", value=answer.message, expected="a gang that lives there", remedy="try again"
            )
        raise OutsideError(f"node {to.node_id}: {answer.message}")

    def _gone_s(self, to: To) -> float:
        """When an agent is given up by who waits for its answer: soon after its stream broke."""
        agent = self._agents.get(to.node_id)
        return math.inf if agent is None or agent.session is not None else agent.heard_s + RETURN_S

    def _forget_oldest(self) -> None:
        while len(self._orders) > KEPT_ORDERS:
            self._orders.popitem(last=False)


def _node(agent: _Agent, now_s: float) -> Node:
    return Node(
        agent.node_id,
        agent.instance_id,
        agent.inventory,
        agent.session is not None,
        now_s - agent.heard_s,
        tuple(replace(gang) for gang in agent.gangs.values()),
        agent.num_dropped,
        agent.is_ending,
    )


def _order(order_id: str, key: GangKey, deadline_s: float) -> pb.Order:
    return pb.Order(id=order_id, job=key.job, attempt=key.attempt, deadline=_duration(deadline_s))


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration
