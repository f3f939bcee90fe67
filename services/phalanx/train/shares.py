"""Where the ranks of an attempt stand on each node, and which slots are free: from events and what agents said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phalanx.lineage.events import Cause, JobState
from phalanx.planner.automatic import with_layout
from phalanx.spec import Job as Spec
from phalanx.train.decide import Outcome, Phase, Share, ShareEnd
from phalanx.train.launch.base import GangKey, GangState, Launcher, Node, Started
from phalanx.train.placement import Capacity, Demand
from phalanx.train.states import Job, Preparation, Start

LOST_WEIGHT = 1  # a cause of a node's own explains more, one that only follows from a peer's end less


def order_of_start(start: Start, node_id: str) -> str:
    """The id of the order that starts the ranks of a node."""
    return f"{start.request_id}/start/{node_id}"


def shares_of(
    job: Job, launcher: Launcher, nodes: Sequence[Node], uptime_s: float, agent_lost_s: float
) -> tuple[Share, ...]:
    """One share a node of the job's attempt. uptime_s: of this process, for nodes that it has not heard yet."""
    assert job.start is not None
    by_id, ends = {node.node_id: node for node in nodes}, launcher.ends(GangKey(str(job.name), job.attempt))
    return tuple(
        _share(job, job.start, each.node_id, by_id.get(each.node_id), ends, launcher, (uptime_s, agent_lost_s))
        for each in job.start.placement
    )


def _share(
    job: Job,
    start: Start,
    node_id: str,
    node: Node | None,
    ends: Mapping[str, ShareEnd],
    launcher: Launcher,
    times: tuple[float, float],
) -> Share:
    uptime_s, agent_lost_s = times
    order = order_of_start(start, node_id)
    if node_id in ends:
        return Share(node_id, Phase.ENDED, ends[node_id], is_ordered=True)
    answer = launcher.started(order)
    if node is not None and node.instance_id != start.instances[node_id]:
        return _lost(node_id, "its agent was started anew, and its ranks are gone with the old one")
    silent_s = uptime_s if node is None else 0.0 if node.is_connected else node.silent_s
    if silent_s > agent_lost_s:
        return _lost(node_id, f"not heard of for {agent_lost_s:g} s")
    if isinstance(answer, Cause):
        return Share(node_id, Phase.REFUSED, ShareEnd(Outcome.FAILED, answer), is_ordered=True)
    rendezvous = answer.rendezvous if isinstance(answer, Started) else ""
    if rendezvous or (node is not None and node.holds(GangKey(str(job.name), job.attempt))):
        return Share(node_id, Phase.LIVING, rendezvous=rendezvous, is_ordered=True)
    if job.state is JobState.RUNNING:
        if node is not None and node.is_connected:
            return _lost(node_id, "its agent holds the ranks no more")
        return Share(node_id, Phase.LIVING, is_ordered=True)
    return Share(node_id, Phase.ASSIGNED, is_ordered=launcher.was_sent(order))


def _lost(node_id: str, why: str) -> Share:
    cause = Cause("node_loss", f"{node_id}: {why}", node_id=node_id)
    return Share(node_id, Phase.LOST, ShareEnd(Outcome.FAILED, cause, LOST_WEIGHT), is_ordered=True)


def free_slots(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, int]:
    """Slots of each connected node that no job's ranks hold: neither by decision nor in fact. A node whose agent ends
    has none.
    """
    taken: dict[str, int] = {}
    decided: set[tuple[str, GangKey]] = set()
    for job in jobs:
        for each in job.placement:
            taken[each.node_id] = taken.get(each.node_id, 0) + len(each.ranks)
            decided.add((each.node_id, GangKey(str(job.name), job.attempt)))
    free = {}
    for node in nodes:
        strangers = sum(
            len(gang.ranks)
            for gang in node.gangs
            if gang.state is GangState.RUNNING and (node.node_id, gang.key) not in decided
        )
        left = node.inventory.num_slots - taken.get(node.node_id, 0) - strangers
        free[node.node_id] = max(0, left) if node.is_connected and not node.is_ending else 0
    return free


def capacities(
    job: Job, device: str, nodes: Sequence[Node], jobs: Iterable[Job], claimed: Mapping[str, int]
) -> tuple[Capacity, ...]:
    """What the nodes can take of a job. device: what its ranks run on. claimed: slots of each node that are not for
    it.
    """
    free = {node_id: max(0, num - claimed.get(node_id, 0)) for node_id, num in free_slots(nodes, jobs).items()}
    return tuple(
        Capacity(
            node.node_id,
            free[node.node_id] if device != "cuda" else min(free[node.node_id], len(node.inventory.gpus)),
            node.inventory.nvlink_domain,
            node.inventory.rail,
            node.inventory.leaf_switch,
            node.node_id in job.avoid_nodes,
        )
        for node in nodes
    )


def demand_of(spec: Spec) -> Demand:
    """What a job needs by its file. Raises PhalanxError where no layout can be chosen for it."""
    world_size = spec.cluster.world_size
    layout = with_layout(spec, world_size).layout(world_size)
    return Demand(world_size, layout.pp, layout.tp)


def prepared_demand(preparation: Preparation) -> Demand:
    """What a job needs by the layout that its ranks get."""
    axes = preparation.placement["parallel"]
    return Demand(preparation.placement["world_size"], axes["pp"], axes["tp"])
