"""Random histories of attempts, commits, zombies, pins and kills: whatever happens, nothing needed is ever removed."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checkpoints import a_draft, open_attempt, restores, save, write_parts

from phalanx.checkpoint.collection import Collector, Outlook
from phalanx.checkpoint.retention import Facts, Policy
from phalanx.checkpoint.survey import Surveyor
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, keys, live_chain
from phalanx.lineage.damage import report_damage
from phalanx.lineage.plan import damaged_checkpoints
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, fail_after, fail_before, on
from phalanx.snapshot import IncompleteCheckpoint
from phalanx.snapshot.commit import commit

GRACE_S = 10.0


class Died(Exception):
    """The collector's process ended here."""


class Histories(RuleBasedStateMachine):
    """One job, one collector that is killed now and then, ranks of several attempts."""

    @initialize(latest=st.integers(0, 3), every=st.sampled_from([0, 0, 4]))
    def begin(self, latest, every):
        self.store = open_store("memory://").within("projects/p/jobs/j")
        self.lineage = Lineage(self.store)
        self.policy = Policy(latest, every)
        self.clock_s = 0.0
        self.pinned, self.forked, self.begun, self.aborted = {}, {}, set(), set()
        self.written = {}  # saves whose parts are all there, not committed
        self.recorded = {}  # attempt -> last step whose records a committed checkpoint names
        self.must_exist = set()
        self.attempt = open_attempt(self.store).number
        self.last = {1: 0}
        self.starts = {1: 0}
        self.restart()

    def restart(self, faults=()):
        """A collector whose memory of graces is empty."""
        store = FaultyStore(self.store, faults) if faults else self.store
        surveyor = Surveyor(store)

        def look():
            survey = surveyor.look()
            facts = Facts(
                survey.links,
                survey.attempts,
                survey.committed,
                damaged=survey.damaged,
                pinned=dict(self.pinned),
                forked=dict(self.forked),
            )
            return Outlook(
                self.policy,
                facts,
                survey.folders,
                frozenset(self.begun),
                frozenset(self.aborted),
                survey.world_sizes,
                survey.stamp,
            )

        self.collector = Collector(store, look, surveyor.stamp, grace_s=GRACE_S, clock=lambda: self.clock_s)

    # Ranks.

    @rule()
    def open_attempt(self):
        attempt = open_attempt(self.store, avoid=tuple(damaged_checkpoints(self.lineage)))
        if attempt.parent is not None:
            assert restores(self.store, attempt.parent)
        self.attempt = attempt.number
        self.last[attempt.number] = self.starts[attempt.number] = attempt.start_step

    @rule(gap=st.integers(1, 3))
    def save(self, gap):
        first, step = self.last[self.attempt] + 1, self.last[self.attempt] + gap
        ref = CheckpointRef(self.attempt, step)
        if not self.is_free(ref):
            return
        save(self.store, ref, 1, first_step=first)
        self.last[self.attempt] = step
        self.begun.discard(ref)

    @rule(gap=st.integers(1, 3), is_announced=st.booleans())
    def write(self, gap, is_announced):
        ref = CheckpointRef(self.attempt, self.last[self.attempt] + gap)
        if not self.is_free(ref):
            return
        if is_announced:
            self.begun.add(ref)
        write_parts(self.store, ref, first_step=self.last[self.attempt] + 1)
        self.written[ref] = self.last[self.attempt]
        self.last[self.attempt] = ref.step

    @precondition(lambda self: self.committable())
    @rule()
    def commit_newest_attempts(self):
        ref = self.committable()[0]
        commit(self.lineage, self.store, a_draft(ref), 1, 5)
        del self.written[ref]
        self.begun.discard(ref)

    @precondition(lambda self: any(ref.attempt == self.attempt and ref not in self.aborted for ref in self.written))
    @rule()
    def give_up(self):
        ref = max(ref for ref in self.written if ref.attempt == self.attempt)
        self.begun.discard(ref)
        self.aborted.add(ref)
        self.written.pop(ref)

    @precondition(lambda self: self.zombies())
    @rule()
    def zombie_commits(self):
        ref = self.zombies()[0]
        before = self.lineage.checkpoints()
        del self.written[ref]
        with suppress(IncompleteCheckpoint, DamagedObject):
            commit(self.lineage, self.store, a_draft(ref), 1, 0)
        assert self.lineage.checkpoints() == before

    @precondition(lambda self: self.lineage.checkpoints())
    @rule(data=st.data())
    def report_damage(self, data):
        ref = data.draw(st.sampled_from(self.lineage.checkpoints()))
        report_damage(self.lineage, self.attempt, ref, 0, "flipped")

    # Operators.

    @rule(data=st.data(), how=st.sampled_from(["pinned", "forked"]))
    def protect(self, data, how):
        committed = self.committed()
        if committed:
            getattr(self, how)[data.draw(st.sampled_from(committed))] = "needed"

    @precondition(lambda self: self.pinned or self.forked)
    @rule()
    def release(self):
        (self.pinned or self.forked).popitem()

    # The collector.

    @rule(passes_s=st.sampled_from([0.0, GRACE_S / 2, GRACE_S, 3 * GRACE_S]))
    def collect(self, passes_s):
        self.clock_s += passes_s
        self.watched(lambda: self.collector.collect())

    @rule(nth=st.integers(0, 6), late=st.booleans(), operation=st.sampled_from(["delete", "delete", "create"]))
    def collect_and_die(self, nth, late, operation):
        fault = (fail_after if late else fail_before)(on(operation, nth=nth), Died())
        self.restart([fault])
        with suppress(Died):
            self.watched(lambda: self.collector.collect())
            self.clock_s += GRACE_S
            self.watched(lambda: self.collector.collect())
        self.restart()

    def watched(self, act):
        """Acts, and checks that everything which had to stay before is there afterwards."""
        needed, steps, tip = self.needed(), self.record_steps(), self.open_keys()
        try:
            act()
        finally:
            left = set(self.committed())
            assert needed <= left, needed - left
            assert self.record_steps() == steps
            assert tip <= {info.key for info in self.store.list()}

    # What must hold.

    @invariant()
    def every_checkpoint_that_exists_restores(self):
        assert all(restores(self.store, ref) for ref in self.committed())

    def committed(self):
        return sorted(ref for info in self.store.list("a") if (ref := keys.manifest_ref(info.key)) is not None)

    def needed(self):
        """Said again, independently of `retention`."""
        live, damaged = list(self.lineage.checkpoints()), damaged_checkpoints(self.lineage)
        good = [ref for ref in live if ref not in damaged]
        parents = {link.attempt.parent for link in live_chain(self.lineage.attempts()) if link.attempt.parent}
        found = set(live[-1:]) | set(good[-max(1, self.policy.keep_latest) :]) | parents
        found |= set(self.pinned) | set(self.forked)
        if self.policy.keep_latest == 0:
            found |= set(live)
        if self.policy.keep_every:
            found |= {ref for ref in good if ref.step % self.policy.keep_every == 0}
        return found & set(self.committed())

    def open_keys(self):
        """All objects of saves of the newest attempt that may yet be committed."""
        last = max((ref.step for ref in self.committed() if ref.attempt == self.attempt), default=0)
        saves = {ref for ref in self.written if ref.attempt == self.attempt and ref.step > last} | self.begun
        saves = {ref for ref in saves if ref.attempt == self.attempt}
        return {info.key for info in self.store.list("a") if keys.checkpoint_of(info.key) in saves}

    def record_steps(self):
        return sorted(step for windows, _ in self.lineage.live_records() for step in windows.step.tolist())

    def committable(self):
        """Written saves of the newest attempt that may be committed: announced, or with nothing later there."""
        return sorted(ref for ref in self.written if ref.attempt == self.attempt and self.is_open(ref))

    def zombies(self):
        """Written saves that ranks of older attempts may commit: a rank has one save in flight, so they are ordered."""
        return sorted(
            ref for ref in self.written if ref.attempt < self.attempt and ref.step > self.last_of(ref.attempt)
        )

    def last_of(self, attempt):
        return max((done.step for done in self.committed() if done.attempt == attempt), default=0)

    def is_open(self, ref):
        return ref in self.begun or ref.step > self.last_of(self.attempt)

    def is_free(self, ref):
        return not any(True for _ in self.store.list(keys.checkpoint(ref)))


Histories.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestHistories = Histories.TestCase
