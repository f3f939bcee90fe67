"""One look at a job, from which everything about its checkpoints is decided: what its storage holds, what was measured
of it, who reads it, and what the caller knows of pins, forks and saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.checkpoint.facts import Facts, Policy
from phalanx.checkpoint.health import Health
from phalanx.checkpoint.measuring import Measurer
from phalanx.checkpoint.survey import Folder, Surveyor
from phalanx.lineage import CheckpointRef
from phalanx.lineage.lease_book import EXPIRY_S, LeaseBook
from phalanx.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Outlook:
    """All that a pass decides from. begun, aborted: saves that were announced, and given up. world_sizes: of the
    checkpoints whose manifest can be read. stamp: changes whenever the decisions may change. promotions: speculative
    checkpoints that were found healthy just now, and why; the facts count them as promoted.
    """

    policy: Policy
    facts: Facts
    folders: Mapping[CheckpointRef, Folder]
    begun: frozenset[CheckpointRef] = frozenset()
    aborted: frozenset[CheckpointRef] = frozenset()
    world_sizes: Mapping[CheckpointRef, int] = field(default_factory=dict)
    stamp: object = None
    promotions: Mapping[CheckpointRef, str] = field(default_factory=dict)


def nothing() -> dict[CheckpointRef, str]:
    """No checkpoint is meant."""
    return {}


class Looker:
    """Looks at one job. store: rooted at the job. lease_expiry_s, clock: see `LeaseBook`."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        lease_expiry_s: float = EXPIRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._surveyor = Surveyor(store)
        self._measurer = Measurer(store, self._surveyor)
        self.leases = LeaseBook(store, expiry_s=lease_expiry_s, clock=clock)

    def stamp(self) -> frozenset[str]:
        """What of storage the decisions follow from; see `Surveyor.stamp`."""
        return self._surveyor.stamp()

    def look(
        self,
        policy: Policy,
        *,
        pinned: Mapping[CheckpointRef, str],
        forked: Callable[[], Mapping[CheckpointRef, str]] = nothing,
        used: Callable[[], Mapping[CheckpointRef, str]] = nothing,
        begun: frozenset[CheckpointRef] = frozenset(),
        aborted: frozenset[CheckpointRef] = frozenset(),
        stamp: Callable[[frozenset[str]], object] = lambda found: found,
    ) -> Outlook:
        """Reads anew. forked, used: asked after the folders that could go were seen; stamp: the whole one, from that of
        storage.
        """
        survey = self._surveyor.look()
        verdicts = self._measurer.verdicts(policy, survey)
        healthy = [
            ref for ref, found in verdicts.items() if found.health is Health.HEALTHY and ref not in survey.damaged
        ]
        promotions = {ref: verdicts[ref].why for ref in healthy[-1:]}
        facts = Facts(
            survey.links,
            survey.attempts,
            survey.committed,
            damaged=survey.damaged,
            pinned=pinned,
            forked=forked(),
            used={ref: f"lease {name}" for ref, name in self.leases.readers().items()} | dict(used()),
            speculative=survey.speculative,
            promoted=survey.promoted | promotions.keys(),
            unhealthy={ref: found.why for ref, found in verdicts.items() if found.health is Health.UNHEALTHY},
            measured=self._measurer.values(policy, survey),
        )
        return Outlook(
            policy, facts, survey.folders, begun, aborted, survey.world_sizes, stamp(survey.stamp), promotions
        )
