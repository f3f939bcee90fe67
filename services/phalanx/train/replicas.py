"""Before an attempt is opened: the newest step that lies whole in the memory of living nodes becomes a checkpoint.

The nodes create its objects in storage, then one of them commits it, all within a deadline; so what the next attempt
goes on from is durable before anything depends on it, and the proof knows nothing of memory. Whatever is missing,
damaged or late leaves the run to the newest checkpoint that is there. May be done again at any time, also by a process
that follows on one that was killed: what is stored is recognised, what is committed is older than nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.events import Cause, EventType
from phalanx.snapshot.replicas import Kept, newest_whole, partner_of
from phalanx.train.book import Book, Draft
from phalanx.train.decide import Record
from phalanx.train.launch.base import GangKey, Launcher, Node, To
from phalanx.train.states import Job, Start

ASK_S, STORE_AT_ONCE = 10.0, 16
LOG = logging.getLogger(__name__)


def partner_address(node_id: str, start: Start, nodes: Sequence[Node]) -> str:
    """Where the shares of a node of the attempt are kept too; "" where it has no partner that keeps any."""
    partner = partner_of(node_id, [each.node_id for each in start.placement])
    return next((node.inventory.replica_address for node in nodes if node.node_id == partner), "")


def store_or_tell(launcher: Launcher, book: Book, job: Job, start: Start, deadline_s: float) -> None:
    """As `store_newest`; a step that can't be stored is told as an event of the job, and left."""
    try:
        store_newest(launcher, Lineage(book.store(job.name)), str(job.name), start, deadline_s)
    except (PhalanxError, OutsideError) as error:
        LOG.warning("%s: what lies in the memory of nodes is left: %s", job.name, error)
        request_id = f"{start.request_id}/memory"
        cause = Cause("storage", f"a step in the memory of nodes was not stored: {error}")
        data = {"action": "notify", "first_step": 0, "last_step": 0}
        record = Record(EventType.INCIDENT, job.attempt, cause=cause, message=cause.message, data=data)
        book.change(job.name, lambda now: None if request_id in now.requests else Draft(record, request_id=request_id))


def store_newest(
    launcher: Launcher, lineage: Lineage, job: str, start: Start, deadline_s: float
) -> CheckpointRef | None:
    """The step that was committed from memory; None where there is none further than storage's newest checkpoint.
    deadline_s: for the whole. Raises OutsideError and PhalanxError where there was one and it could not be stored.
    """
    attempt = lineage.newest_attempt()
    if attempt is None or attempt.request_id == start.request_id:
        return None
    key = GangKey(job, attempt.number)
    kept = {
        to: tuple(each for each in shares if each.ref.attempt == attempt.number and _is_wanted(each, start))
        for to, shares in _asked(launcher, job).items()
    }
    ref = newest_whole({to.node_id: shares for to, shares in kept.items()})
    stored = max(lineage.checkpoints(), default=None)
    if ref is None or ref.step <= max(attempt.start_step, stored.step if stored is not None else 0):
        return None
    holders = [to for to, shares in kept.items() if any(each.ref == ref for each in shares)]
    first = next(to for to in holders if any(each.ref == ref and each.rank == 0 for each in kept[to]))
    with ThreadPoolExecutor(STORE_AT_ONCE, thread_name_prefix="store-shares") as pool:
        list(pool.map(lambda to: launcher.store_shares(to, key, ref.step, deadline_s, commit=False), holders))
    launcher.store_shares(first, key, ref.step, deadline_s, commit=True)
    LOG.info("%s: %s was committed from the memory of %d nodes", job, ref, len(holders))
    return ref


def _is_wanted(kept: Kept, start: Start) -> bool:
    return not start.avoid_from or kept.ref.step < start.avoid_from


def _asked(launcher: Launcher, job: str) -> dict[To, tuple[Kept, ...]]:
    """What each node that is there keeps; one that does not answer keeps nothing."""
    nodes = [To(each.node_id, each.instance_id) for each in launcher.nodes() if each.is_connected]

    def ask(to: To) -> tuple[Kept, ...]:
        try:
            return launcher.kept_shares(to, job, ASK_S)
        except (OutsideError, PhalanxError) as error:
            LOG.warning("%s: what node %s keeps in memory is not known: %s", job, to.node_id, error)
            return ()

    with ThreadPoolExecutor(STORE_AT_ONCE, thread_name_prefix="ask-shares") as pool:
        return dict(zip(nodes, pool.map(ask, nodes), strict=True))
