"""Before an attempt is opened: the newest step that lies whole in the memory of living nodes becomes a checkpoint.

The nodes create its objects in storage, then one of them commits it, all within a deadline; so what the next attempt
goes on from is durable before anything depends on it, and the proof knows nothing of memory. Every share lies with two
nodes, and both store it: it is committed as soon as all shares are stored, so a node that dies meanwhile is not waited
for. Whatever is missing, damaged or late leaves the run to the step before it, or to the newest checkpoint that is
there. May be done again at any time, also by a process that follows on one that was killed: what is stored is
recognised, what is committed is older than nothing.

The next attempt's nodes are told who keeps shares of its parent. That is known to this process alone: one that follows
on it knows of none, and ranks read from storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.events import Cause, EventType
from phalanx.snapshot import background
from phalanx.snapshot.replicas import Kept, newest_whole, partner_of
from phalanx.train.book import Book, Draft
from phalanx.train.decide import Record
from phalanx.train.launch.base import GangKey, Holder, Launcher, Node, To
from phalanx.train.states import Job, Start

ASK_S, ASK_AT_ONCE = 10.0, 16
KEPT_JOBS: Final = 1000
LOG = logging.getLogger(__name__)

Shares = Mapping[To, Sequence[Kept]]


class NodeMemory:
    """What nodes keep of jobs, as it was when an attempt was last to be opened. Safe from any thread."""

    def __init__(self, launcher: Launcher, book: Book) -> None:
        self._launcher, self._book = launcher, book
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Shares] = OrderedDict()

    def store_or_tell(self, job: Job, start: Start, deadline_s: float) -> None:
        """As `store_newest`; a step that can't be stored is told as an event of the job, and left."""
        ends_s = time.monotonic() + deadline_s
        kept = asked(self._launcher, str(job.name))
        with self._lock:
            self._kept[str(job.name)] = kept
            self._kept.move_to_end(str(job.name))
            while len(self._kept) > KEPT_JOBS:
                self._kept.popitem(last=False)
        try:
            store_newest(self._launcher, Lineage(self._book.store(job.name)), str(job.name), start, kept, ends_s)
        except (PhalanxError, OutsideError) as error:
            LOG.warning("%s: what lies in the memory of nodes is left: %s", job.name, error)
            request_id = f"{start.request_id}/memory"
            cause = Cause("storage", f"a step in the memory of nodes was not stored: {error}")
            data = {"action": "notify", "first_step": 0, "last_step": 0}
            record = Record(EventType.INCIDENT, job.attempt, cause=cause, message=cause.message, data=data)
            draft = Draft(record, request_id=request_id)
            self._book.change(job.name, lambda now: None if request_id in now.requests else draft)

    def partner(self, node_id: str, start: Start) -> str:
        """Where the shares of a node of the attempt are kept too; "" where it has no partner that keeps any."""
        return partner_address(node_id, start, self._launcher.nodes())

    def holders(self, job: str, parent: CheckpointRef | None, node_id: str) -> tuple[Holder, ...]:
        """Who beside this node keeps shares of the parent, and of which ranks."""
        with self._lock:
            kept = self._kept.get(job, {})
        addresses = {
            To(each.node_id, each.instance_id): each.inventory.replica_address for each in self._launcher.nodes()
        }
        found = (
            Holder(addresses.get(to, ""), tuple(sorted({each.rank for each in shares if each.ref == parent})))
            for to, shares in kept.items()
            if to.node_id != node_id
        )
        return tuple(each for each in found if each.address and each.ranks)


def partner_address(node_id: str, start: Start, nodes: Sequence[Node]) -> str:
    """Where the shares of a node of the attempt are kept too; "" where it has no partner that keeps any."""
    partner = partner_of(node_id, [each.node_id for each in start.placement])
    return next((node.inventory.replica_address for node in nodes if node.node_id == partner), "")


def store_newest(
    launcher: Launcher, lineage: Lineage, job: str, start: Start, kept: Shares, ends_s: float
) -> CheckpointRef | None:
    """The step that was committed from memory; None where there is none further than storage's newest checkpoint.
    kept: what each node keeps. ends_s: monotonic, for the whole. Raises OutsideError and PhalanxError where there was
    one and none could be stored.
    """
    attempt = lineage.newest_attempt()
    if attempt is None or attempt.request_id == start.request_id:
        return None
    key = GangKey(job, attempt.number)
    stored = max(lineage.checkpoints(), default=None)
    newest = max(attempt.start_step, stored.step if stored is not None else 0)
    wanted = {
        to: tuple(each for each in shares if each.ref.attempt == attempt.number and _is_wanted(each, start))
        for to, shares in kept.items()
    }
    failures: list[str] = []
    while True:
        ref = newest_whole({to.node_id: shares for to, shares in wanted.items()})
        if ref is None or ref.step <= newest:
            if failures:
                raise OutsideError("; ".join(failures))
            return None
        holders = {to: tuple(each for each in shares if each.ref == ref) for to, shares in wanted.items()}
        try:
            _store(launcher, key, ref, {to: shares for to, shares in holders.items() if shares}, ends_s)
        except (PhalanxError, OutsideError) as error:
            LOG.warning("%s: %s in the memory of nodes is left: %s", job, ref, error)
            failures.append(str(error))
            wanted = {to: tuple(each for each in shares if each.ref != ref) for to, shares in wanted.items()}
            continue
        LOG.info("%s: %s was committed from the memory of %d nodes", job, ref, len(holders))
        return ref


def _store(launcher: Launcher, key: GangKey, ref: CheckpointRef, holders: Shares, ends_s: float) -> None:
    """Has a whole step stored by its holders and committed by one that has rank 0's share. Raises OutsideError and
    PhalanxError where the shares of some rank are stored by none, or no such holder is left.
    """

    def order(to: To, *, commit: bool) -> Callable[[], None]:
        left_s = max(0.1, ends_s - time.monotonic())
        return lambda: launcher.store_shares(to, key, ref.step, left_s, commit=commit)

    waiting: dict[Future[None], To] = {
        background.begin(order(to, commit=False), "store-shares"): to for to in sorted(holders, key=str)
    }
    left = set(range(next(iter(holders.values()))[0].world_size))
    able: list[To] = []  # to commit
    whys: list[str] = []
    while left and waiting:
        done, _ = wait(waiting, max(0.0, ends_s - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise OutsideError(f"{ref} was not stored in time by {', '.join(to.node_id for to in waiting.values())}")
        for each in done:
            to, error = waiting.pop(each), each.exception()
            if error is None:
                left -= {share.rank for share in holders[to]}
                able += [to] if any(share.rank == 0 for share in holders[to]) else []
            else:
                whys.append(f"{to.node_id}: {error}")
    if left:
        raise OutsideError(f"shares of {len(left)} ranks of {ref} were not stored: {'; '.join(whys)}")
    for to in able:
        try:
            order(to, commit=True)()
        except (PhalanxError, OutsideError) as error:
            whys.append(f"{to.node_id}: {error}")
        else:
            return
    raise OutsideError(f"{ref} was not committed: {'; '.join(whys)}")


def _is_wanted(kept: Kept, start: Start) -> bool:
    return not start.avoid_from or kept.ref.step < start.avoid_from


def asked(launcher: Launcher, job: str) -> dict[To, tuple[Kept, ...]]:
    """What each node that is there keeps; one that does not answer keeps nothing."""
    nodes = [To(each.node_id, each.instance_id) for each in launcher.nodes() if each.is_connected]

    def ask(to: To) -> tuple[Kept, ...]:
        try:
            return launcher.kept_shares(to, job, ASK_S)
        except (OutsideError, PhalanxError) as error:
            LOG.warning("%s: what node %s keeps in memory is not known: %s", job, to.node_id, error)
            return ()

    answers = background.each(lambda number: ask(nodes[number]), len(nodes), ASK_AT_ONCE, "ask-shares")
    return dict(zip(nodes, answers, strict=True))
