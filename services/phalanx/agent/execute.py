"""Train's orders, carried out on a node: each in a thread of its own, answered once."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.agent import preparing, records
from phalanx.agent.attempts import Attempt
from phalanx.agent.facts import JobFacts
from phalanx.agent.gangs import GangKey
from phalanx.agent.log_bound import refuse_removed
from phalanx.agent.logs import read_chunk
from phalanx.agent.node import CHECKPOINT_SIGNAL, STOP_SIGNAL, Node
from phalanx.agent.orders import OrderBook
from phalanx.agent.replica_keeper import Attempted, ReplicaKeeper
from phalanx.agent.servers import ForkServers
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import rank_service_pb2
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import Cause, GangOrder, Rendezvous
from phalanx.gang.order import LOOPBACK
from phalanx.lineage import CheckpointRef
from phalanx.rpc.errors import FailedPrecondition, Superseded
from phalanx.trainer.local import ENTRY

DEFAULT_DEADLINE_S = 60.0
_NAME = r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?"
_JOB = re.compile(f"projects/{_NAME}/jobs/{_NAME}")  # it names a folder here
# An agent that ends answers none of these: its failure would count as the job's, which has done nothing.
BEGINNINGS = ("prepare", "start_gang")
LOG = logging.getLogger(__name__)


class Executor:
    """Carries out orders. address: of this node for ranks of others. socket: where ranks reach this agent.

    entry: what ranks run. send: gives an answer to train.
    """

    def __init__(
        self,
        node: Node,
        servers: ForkServers,
        address: str,
        socket: Path,
        send: Callable[[pb.Answer], None],
        entry: str = ENTRY,
        keeper: ReplicaKeeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._node, self._servers, self._address, self._socket, self._entry = node, servers, address, socket, entry
        self._book: OrderBook[pb.Answer] = OrderBook(send)
        self._handlers: Mapping[str, Callable[[pb.Order, float], Mapping[str, Any]]] = {
            "prepare": self._prepare,
            "start_gang": self._start_gang,
            "end_gang": self._end_gang,
            "give_orders": self._give_orders,
            "take_stacks": self._take_stacks,
            "read_log": self._read_log,
            "release_job": self._release_job,
            "list_shares": self._list_shares,
            "store_shares": self._store_shares,
        }

    def take(self, order: pb.Order) -> None:
        """Begins to carry out an order that is new; returns at once."""
        if self._book.is_new(order.id):
            name = order.WhichOneof("order") or "nothing"
            threading.Thread(target=self._carry_out, args=(order,), name=f"order-{name}", daemon=True).start()

    def _carry_out(self, order: pb.Order) -> None:
        answer = pb.Answer(order_id=order.id)
        try:
            deadline_s = order.deadline.ToTimedelta().total_seconds() or DEFAULT_DEADLINE_S
            if not _JOB.fullmatch(order.job):
                raise PhalanxError("job", value=order.job, expected="projects/<p>/jobs/<uid>", remedy="correct it")
            handler = self._handlers.get(order.WhichOneof("order") or "")
            if handler is None:
                raise OutsideError("this agent knows no such order: train and agent are of different versions")
            answer = pb.Answer(order_id=order.id, **handler(order, deadline_s))
        except (PhalanxError, OutsideError) as error:
            LOG.warning("order %s of %s: %s", order.WhichOneof("order"), order.job, error)
            answer.failure.cause.CopyFrom(records.to_cause(_cause(error), self._node.node_id))
        except BaseException as error:
            LOG.exception("order %s of %s", order.WhichOneof("order"), order.job)
            cause = Cause("error", None, f"{type(error).__name__}: {error}")
            answer.failure.cause.CopyFrom(records.to_cause(cause, self._node.node_id))
        if self._node.is_stopping and order.WhichOneof("order") in BEGINNINGS:
            LOG.info("order %s of %s stays open: this agent ends", order.WhichOneof("order"), order.job)
            return
        self._book.answer(order.id, answer)

    def _prepare(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        asked = order.prepare
        found = preparing.prepare(json.loads(asked.spec_json), asked.world_size, _origin(asked), deadline_s)
        self._servers.warm(order.job, found["code_digest"])
        prepared = pb.Prepared(
            arguments_json=json.dumps(found["arguments"]),
            identity_digest=found["identity_digest"],
            code_digest=found["code_digest"],
            warnings=found["warnings"],
            placement_json=json.dumps(found["placement"]),
        )
        return {"prepared": prepared}

    def _start_gang(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        asked, key = order.start_gang, GangKey(order.job, order.attempt)
        arguments = json.loads(asked.arguments_json)
        facts = JobFacts.of(arguments)
        parent = (asked.parent_attempt, asked.parent_step) if asked.parent_attempt else None
        gang_order = GangOrder(
            world_size=asked.world_size,
            entry=self._entry,
            log_dir=self._node.log_folder(key.job, key.attempt),
            arguments={**arguments, "debug_rank": None, "agent": self._agent_of(key)},
            attempt=key.attempt,
            ranks=tuple(sorted(asked.ranks)),
            rendezvous=_rendezvous(asked.rendezvous),
            address=LOOPBACK if len(asked.ranks) == asked.world_size else self._address,
        )
        ends_s = time.monotonic() + deadline_s
        if self._keeper is not None and facts.job is not None and facts.job.checkpoint.memory_interval:
            begins = CheckpointRef(*parent) if parent is not None else None
            self._keeper.open(Attempted(key, facts.job, asked.partner, asked.token, begins, _holders(asked)))
        held = self._node.start(Attempt(key, parent, asked.token, facts.save_s), gang_order, asked.code_digest, facts)
        if time.monotonic() > ends_s:  # train has given this start up
            self._node.end(key, 0.0)
            raise OutsideError(f"{key} did not start within {deadline_s:g} s")
        pids = [held.pids[rank] for rank in asked.ranks]
        rendezvous = f"{held.rendezvous.address}:{held.rendezvous.port}"
        return {"gang_started": pb.GangStarted(rendezvous=rendezvous, pids=pids)}

    def _agent_of(self, key: GangKey) -> Mapping[str, Any]:
        """How ranks reach this agent, and as whom."""
        return {"socket": str(self._socket), "job": key.job, "attempt": key.attempt}

    def _end_gang(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        asked, key = order.end_gang, GangKey(order.job, order.attempt)
        LOG.info("%s is to end: %s", key, asked.why)
        because = Cause("superseded", None, asked.why) if asked.superseded else None
        self._node.end(key, asked.grace.ToTimedelta().total_seconds(), because)
        return {"done": pb.Done()}

    def _give_orders(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        key = GangKey(order.job, order.attempt)
        if order.give_orders.checkpoint:
            self._node.give(key, rank_service_pb2.RANK_ORDER_CHECKPOINT, CHECKPOINT_SIGNAL)
        if order.give_orders.stop:
            self._node.give(key, rank_service_pb2.RANK_ORDER_STOP, STOP_SIGNAL)
        return {"done": pb.Done()}

    def _take_stacks(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        key = GangKey(order.job, order.attempt)
        held = self._node.gang(key)
        if held is None:
            raise FailedPrecondition(str(key), expected="an attempt that runs here", remedy="look at its logs instead")
        wanted = set(order.take_stacks.ranks)
        stacks = {rank: text for rank, text in held.stacks(deadline_s).items() if not wanted or rank in wanted}
        return {"stacks": pb.Stacks(stacks=stacks)}

    def _read_log(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        asked = order.read_log
        folder = self._node.log_folder(order.job, order.attempt)
        attempt = int(folder.name.partition("-")[2] or 0)
        refuse_removed(folder, attempt)
        held = self._node.gang(GangKey(order.job, attempt))  # asked before the log is read: what comes after is in it
        chunk = read_chunk(folder / f"rank{asked.rank}.log", asked.offset, asked.max_bytes)
        complete = held is None and chunk.offset + len(chunk.data) >= chunk.size
        return {"log_chunk": pb.LogChunk(data=chunk.data, offset=chunk.offset, complete=complete)}

    def _release_job(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        self._node.release(order.job)
        if self._keeper is not None:
            self._keeper.forget(order.job)
        return {"done": pb.Done()}

    def _list_shares(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        kept = self._keeper.kept(order.job) if self._keeper is not None else []
        shares = [
            pb.KeptShare(attempt=each.ref.attempt, step=each.ref.step, rank=each.rank, world_size=each.world_size)
            for each in kept
        ]
        return {"kept_shares": pb.KeptShares(shares=shares)}

    def _store_shares(self, order: pb.Order, deadline_s: float) -> Mapping[str, Any]:
        asked, key = order.store_shares, GangKey(order.job, order.attempt)
        if self._keeper is None:
            raise FailedPrecondition(str(key), expected="shares in memory", remedy="go on from storage")
        if asked.commit:
            self._keeper.commit(key, asked.step, deadline_s)
        else:
            self._keeper.store(key, asked.step)
        return {"done": pb.Done()}


def _holders(asked: pb.StartGang) -> Mapping[int, tuple[str, ...]]:
    """Who keeps the share of each rank."""
    found: dict[int, tuple[str, ...]] = {}
    for holder in asked.holders:
        for rank in holder.ranks:
            found[rank] = (*found.get(rank, ()), holder.address)
    return found


def _rendezvous(text: str) -> Rendezvous | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    return Rendezvous(host, int(port))


def _origin(asked: pb.Prepare) -> Mapping[str, Any] | None:
    if not asked.HasField("origin"):
        return None
    origin = asked.origin
    return {"attempt": origin.attempt, "step": origin.step, "spec": json.loads(origin.spec_json)}


def _cause(error: PhalanxError | OutsideError) -> Cause:
    if isinstance(error, Superseded):
        return Cause("superseded", None, str(error))
    if isinstance(error, PhalanxError):
        return Cause("user_error", None, str(error))
    return Cause("storage" if isinstance(error, preparing.StorageError) else "error", None, str(error))
