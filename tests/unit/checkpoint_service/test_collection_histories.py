"""Random histories of attempts, commits, zombies, speculative saves, pins, readers and kills: whatever happens, nothing
needed is ever removed (cases 4 and 15).
"""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checkpoints import a_draft, open_attempt, restores, save, write_parts
from support.dying import DyingStore, Killed

from phalanx.checkpoint.collection import Collector
from phalanx.checkpoint.facts import Policy
from phalanx.checkpoint.looking import Looker
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, keys, live_chain
from phalanx.lineage.damage import report_damage
from phalanx.lineage.lease_book import EXPIRY_S
from phalanx.lineage.leases import Lease, leased
from phalanx.lineage.plan import damaged_checkpoints
from phalanx.objects import open_store
from phalanx.snapshot import IncompleteCheckpoint
from phalanx.snapshot.commit import commit

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_patience")]
GRACE_S = 10.0


class Histories(RuleBasedStateMachine):
    """One job, one collector that is killed now and then, ranks of several attempts, readers of several processes."""

    @initialize(
        latest=st.integers(0, 3), every=st.sampled_from([0, 0, 4]), best=st.integers(0, 2), waiting=st.integers(1, 2)
    )
    def begin(self, latest, every, best, waiting):
        self.store = open_store("memory://").within("projects/p/jobs/j")
        self.lineage = Lineage(self.store)
        self.policy = Policy(latest, every, best, "validation_loss", keep_speculative=waiting, healthy_steps=2)
        self.metrics, self.speculative = {}, set()
        self.reading, self.dead_readers = {}, {}
        self.clock_s = 0.0
        self.pinned, self.forked, self.begun, self.aborted = {}, {}, set(), set()
        self.written = {}  # saves whose parts are all there, not committed
        self.recorded = {}  # attempt -> last step whose records a committed checkpoint names
        self.must_exist = set()
        self.attempt = open_attempt(self.store).number
        self.last = {1: 0}
        self.starts = {1: 0}
        self.restart()

    def restart(self, dies_at=None, late=False):
        """A collector whose memory of graces and leases is empty; it dies at its operation of that number."""
        store = self.store if dies_at is None else DyingStore(self.store, dies_at, after=late)
        looker = Looker(store, clock=lambda: self.clock_s)

        def look():
            return looker.look(
                self.policy,
                pinned=dict(self.pinned),
                forked=lambda: dict(self.forked),
                begun=frozenset(self.begun),
                aborted=frozenset(self.aborted),
            )

        self.collector = Collector(
            store, look, looker.stamp, grace_s=GRACE_S, clock=lambda: self.clock_s, leases=looker.leases
        )

    # Ranks.

    @rule()
    def open_attempt(self):
        attempt = open_attempt(self.store, avoid=tuple(damaged_checkpoints(self.lineage)))
        if attempt.parent is not None:
            assert restores(self.store, attempt.parent)
        self.attempt = attempt.number
        self.last[attempt.number] = self.starts[attempt.number] = attempt.start_step

    @rule(
        gap=st.integers(1, 3),
        speculative=st.booleans(),
        loss=st.sampled_from([None, 1.0, 1.0, 1.0, 9.0, math.nan]),
        metric=st.sampled_from([None, 1.0, 2.0, 3.0]),
    )
    def save(self, gap, speculative, loss, metric):
        first, step = self.last[self.attempt] + 1, self.last[self.attempt] + gap
        ref = CheckpointRef(self.attempt, step)
        if not self.is_free(ref):
            return
        metrics = {} if metric is None else {"validation_loss": metric}
        save(self.store, ref, 1, first_step=first, loss=loss, speculative=speculative, metrics=metrics)
        if speculative:
            self.speculative.add(ref)
        elif metric is not None:
            self.metrics[ref] = metric
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

    @rule(at=st.integers(0, 70), late=st.booleans())
    def collect_and_die(self, at, late):
        """Killed at any of its operations, in the first pass or in the next one."""
        self.restart(at, late)
        with suppress(Killed):
            self.watched(lambda: self.collector.collect())
            self.clock_s += GRACE_S
            self.watched(lambda: self.collector.collect())
        self.restart()

    # Readers: exports, copies, checks.

    @precondition(lambda self: self.committed())
    @rule(data=st.data())
    def begin_to_read(self, data):
        """Refused at most where a removal was killed that had marked it."""
        ref, reader = data.draw(st.sampled_from(self.committed())), ExitStack()
        if ref in self.reading:
            return
        with suppress(PhalanxError):
            self.reading[ref] = reader, reader.enter_context(leased(self.store, ref, "export"))

    @precondition(lambda self: self.reading)
    @rule()
    def end_to_read(self):
        ref, (reader, _) = self.reading.popitem()
        assert restores(self.store, ref)
        reader.close()

    @precondition(lambda self: self.committed())
    @rule(data=st.data())
    def reader_is_killed(self, data):
        """Its lease stays behind; the collector's own clock ends it."""
        ref = data.draw(st.sampled_from(self.committed()))
        Lease(self.store, ref, "export").renew()
        self.dead_readers[ref] = self.clock_s

    def watched(self, act):
        """Acts, and checks that everything which had to stay before is there afterwards."""
        for _, lease in self.reading.values():
            lease.renew()  # as its thread does in the time that the clock of this test leaps over
        needed, steps, tip, last = self.needed(), self.record_steps(), self.open_keys(), self.last_promoted()
        try:
            act()
        finally:
            left = set(self.committed())
            assert needed <= left, needed - left
            assert last is None or (self.last_promoted() or last) > last or last in left
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
        found = set(live[-1:]) | set(good[-1:]) | parents
        found |= set(self.pinned) | set(self.forked) | set(self.reading)
        found |= {ref for ref, at in self.dead_readers.items() if self.clock_s - at < EXPIRY_S}
        regular = [ref for ref in good if ref not in self.speculative]
        if self.policy.keep_latest == 0:
            found |= set(live) - self.speculative
        else:
            found |= set(regular[-self.policy.keep_latest :]) | set(self.best(regular))
        if self.policy.keep_every:
            found |= {ref for ref in regular if ref.step % self.policy.keep_every == 0}
        return found & set(self.committed())

    def best(self, regular):
        """The best of them; of equal ones the newest."""
        known = [ref for ref in regular if ref in self.metrics]
        return sorted(known, key=lambda ref: (self.metrics[ref], -ref.attempt, -ref.step))[: self.policy.keep_best]

    def last_promoted(self):
        """The newest good live checkpoint that storage says was found healthy."""
        damaged = damaged_checkpoints(self.lineage)
        promoted = (ref for ref in self.lineage.checkpoints() if any(self.store.list(keys.promoted(ref))))
        return max((ref for ref in promoted if ref not in damaged), default=None)

    def open_keys(self):
        """All objects of saves of the newest attempt that may yet be committed."""
        last = max((ref.step for ref in self.committed() if ref.attempt == self.attempt), default=0)
        saves = {ref for ref in self.written if ref.attempt == self.attempt and ref.step > last} | self.begun
        saves = {ref for ref in saves if ref.attempt == self.attempt}
        return {info.key for info in self.store.list("a") if keys.checkpoint_of(info.key) in saves}

    def record_steps(self):
        return sorted(step for windows, _ in self.lineage.records.live() for step in windows.step.tolist())

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

    def teardown(self):
        for ref, (reader, _) in getattr(self, "reading", {}).items():
            assert restores(self.store, ref)
            reader.close()


Histories.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestHistories = Histories.TestCase
