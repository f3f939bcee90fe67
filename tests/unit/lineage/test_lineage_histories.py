"""Random histories: attempts, zombies and damage in any interleaving, against an oracle that never looks at parents.

The oracle is told events as they happen and keeps three lists. It knows no chain walk: a commit counts if its attempt
is the newest, and opening an attempt cuts the lists. What the store says must be the same at any time.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lineage_kit import a_manifest, memory_store, open_next

from phalanx.lineage import CheckpointRef, Lineage, live_chain, live_checkpoints, live_journal


class LineageMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.lineage = Lineage(memory_store())
        self.newest = 0
        self.chain: list[int] = []
        self.live: list[CheckpointRef] = []
        self.entries: list[tuple[int, int]] = []
        self.everything: list[CheckpointRef] = []
        self.last_step: dict[int, int] = {}
        self.num_entries: dict[int, int] = {}
        self.seen_by: dict[int, list[tuple[int, int]]] = {}

    @rule(data=st.data())
    def open_attempt(self, data: st.DataObject) -> None:
        avoid = data.draw(st.sets(st.sampled_from(self.everything))) if self.everything else set()
        attempt = open_next(self.lineage, avoid=tuple(avoid))
        while self.live and self.live[-1] in avoid:
            self.live.pop()
        parent = self.live[-1] if self.live else None
        self.newest += 1
        assert (attempt.number, attempt.parent) == (self.newest, parent)
        ancestors = self.chain[: self.chain.index(parent.attempt) + 1] if parent else []
        self.entries = [entry for entry in self.entries if entry[0] in ancestors]
        self.chain = [*ancestors, self.newest]
        self.last_step[self.newest] = parent.step if parent else 0
        self.num_entries[self.newest] = 0
        self.seen_by[self.newest] = list(self.entries)

    @precondition(lambda self: self.newest)
    @rule(data=st.data(), distance=st.integers(1, 4))
    def commit(self, data: st.DataObject, distance: int) -> None:
        attempt = data.draw(st.integers(1, self.newest))
        self.last_step[attempt] += distance
        ref = CheckpointRef(attempt, self.last_step[attempt])
        self.lineage.commit(a_manifest(ref.attempt, ref.step))
        self.everything.append(ref)
        if attempt == self.newest:
            self.live.append(ref)

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def append_journal(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.newest))
        entry = self.lineage.append_journal(attempt, "damage", 0, {})
        self.num_entries[attempt] += 1
        assert (entry.attempt, entry.number) == (attempt, self.num_entries[attempt])
        self.seen_by[attempt].append((attempt, entry.number))
        if attempt == self.newest:
            self.entries.append((attempt, entry.number))

    @invariant()
    def live_checkpoints_are_the_oracles(self) -> None:
        live = self.lineage.checkpoints()
        assert list(live) == self.live
        steps = [ref.step for ref in live]
        assert all(a < b for a, b in itertools.pairwise(steps))
        assert live == live_checkpoints(self.lineage.attempts(), reversed(self.everything))

    @invariant()
    def no_older_attempt_is_live_beyond_its_childs_parent(self) -> None:
        links = self.lineage.chain()
        assert [link.attempt.number for link in links] == self.chain
        assert links == live_chain(self.lineage.attempts())
        for link, child in itertools.pairwise(links):
            assert child.attempt.parent == CheckpointRef(link.attempt.number, link.last_step)
            late = [ref for ref in self.everything if ref.attempt == link.attempt.number and ref.step > link.last_step]
            assert not set(late) & set(self.live)

    @invariant()
    def journals_are_the_oracles(self) -> None:
        journals = {number: self.lineage.journal(number) for number in range(1, self.newest + 1)}
        for number, journal in journals.items():
            assert [(entry.attempt, entry.number) for entry in journal] == self.seen_by[number]
        if self.newest:
            everything = [entry for number in journals for entry in journals[number] if entry.attempt == number]
            assert live_journal(self.lineage.attempts(), everything) == journals[self.newest]
            assert [(entry.attempt, entry.number) for entry in journals[self.newest]] == self.entries


LineageMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestLineageHistories = LineageMachine.TestCase
