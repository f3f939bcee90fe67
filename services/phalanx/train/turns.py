"""Whose turn it is: jobs that wait get slots in the order in which they were submitted.

What ranks leave free is told first and then given away, the oldest job that waits being asked first. A job that pauses
before its next try keeps a claim on the slots that it had, so that no younger one takes them meanwhile. A job that
does not fit holds up nobody who does: there are no reservations beyond these pauses, which are a minute at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from phalanx.lineage.events import JobState
from phalanx.train.recovery import backoff_s
from phalanx.train.states import ON_NODES, Intent, Job

CLAIM_MARGIN_S = 1.0  # the claim outlives the pause until the job was asked again


def age(job: Job) -> tuple[str, str]:
    """Sorts jobs by their submission, the oldest first, and by name where that is the same."""
    return (job.registered.created, str(job.name))


def in_turn(jobs: Iterable[Job]) -> list[Job]:
    """The order in which jobs are decided about: those on nodes, whose end frees slots, then all others by age."""
    return sorted(jobs, key=lambda job: (job.state not in ON_NODES, age(job)))


def pause_s(job: Job) -> float:
    """How long a job that waits does so before its next try, however many slots are free."""
    return backoff_s(max(job.num_without_progress, job.num_failed_starts, job.num_failed_checks))


def claimed_slots(job: Job, jobs: Iterable[Job], waited_s: Callable[[Job], float]) -> Mapping[str, int]:
    """Slots of each node that are not for this job, as older ones had them and pause. waited_s: since the last decision
    about a job.
    """
    claimed: dict[str, int] = {}
    for other in jobs:
        is_before = other.state is JobState.RECOVERING and other.intent is Intent.RUN and age(other) < age(job)
        if not is_before or other.start is None:
            continue
        pause = pause_s(other)
        if pause and waited_s(other) < pause + CLAIM_MARGIN_S:
            for each in other.start.placement:
                claimed[each.node_id] = claimed.get(each.node_id, 0) + len(each.ranks)
    return claimed
