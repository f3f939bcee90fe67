"""What stays and what goes, and the words for it."""

from __future__ import annotations

from support.checkpoints import CODE, IDENTITY

from phalanx.checkpoint.collection import leftover
from phalanx.checkpoint.retention import Facts, Policy, decide, resume_why, why_dead
from phalanx.lineage import Attempt, CheckpointRef, live_chain


def attempt(number, parent=None, journal=()):
    ref = CheckpointRef(*parent) if parent else None
    return Attempt(number, ref, journal, IDENTITY, CODE, IDENTITY, {}, f"r{number}")


def facts_of(attempts, committed, **fields):
    refs = frozenset(CheckpointRef(*pair) for pair in committed)
    named = {name: {CheckpointRef(*pair): why for pair, why in values.items()} for name, values in fields.items()}
    return Facts(live_chain(attempts), tuple(attempts), refs, **named)


def kept(policy, facts):
    return {(d.ref.attempt, d.ref.step): d.why for d in decide(policy, facts) if d.stays}


def gone(policy, facts):
    return {(d.ref.attempt, d.ref.step): d.why for d in decide(policy, facts) if not d.stays}


ONE = [attempt(1)]
FIVE = [(1, step) for step in (2, 4, 6, 8, 10)]


def test_decide_without_a_limit_keeps_every_live_checkpoint():
    facts = facts_of(ONE, FIVE)
    assert len(kept(Policy(), facts)) == 5 and not gone(Policy(), facts)


def test_decide_keeps_the_newest_k_and_every_nth_step():
    found = kept(Policy(keep_latest=2, keep_every=4), facts_of(ONE, FIVE))
    assert found == {
        (1, 4): "every 4 steps one stays (checkpoint.keep_every_n)",
        (1, 8): "among the newest 2 (checkpoint.keep_latest_k)",
        (1, 10): "the newest live checkpoint",
    }
    reasons = gone(Policy(keep_latest=2, keep_every=4), facts_of(ONE, FIVE))
    assert reasons == dict.fromkeys([(1, 2), (1, 6)], "older than the newest 2 (checkpoint.keep_latest_k)")


def test_decide_does_not_count_damaged_checkpoints_and_keeps_the_newest_good_one():
    facts = facts_of(ONE, FIVE, damaged={(1, 10): "flipped", (1, 4): "flipped"})
    assert kept(Policy(keep_latest=1), facts) == {
        (1, 10): "the newest live checkpoint",
        (1, 8): "the newest live checkpoint that is not damaged",
    }
    assert gone(Policy(keep_latest=1), facts)[(1, 4)] == "damaged: flipped"
    assert resume_why(CheckpointRef(1, 8), facts) == "the newest live checkpoint that is not damaged"
    assert resume_why(CheckpointRef(1, 6), facts) is None


def test_decide_keeps_what_attempts_on_the_chain_started_from():
    attempts = [attempt(1), attempt(2, (1, 4), ((1, 0),)), attempt(3, (2, 6), ((1, 0), (2, 0)))]
    facts = facts_of(attempts, [(1, 2), (1, 4), (1, 6), (2, 6), (2, 8), (3, 8), (3, 10)])
    assert kept(Policy(keep_latest=1), facts) == {
        (1, 4): "attempt 2 started from it",
        (2, 6): "attempt 3 started from it",
        (3, 10): "the newest live checkpoint",
    }
    reasons = gone(Policy(keep_latest=1), facts)
    assert reasons[(1, 6)] == "dead: attempt 2 went on from step 4"
    assert reasons[(2, 8)] == "dead: attempt 3 went on from step 6"


def test_decide_removes_the_dead_even_without_a_limit_unless_somebody_needs_them():
    attempts = [attempt(1), attempt(2), attempt(3, (1, 4), ((1, 0),))]
    dead = {(1, 6): "attempt 3 went on from step 4", (2, 2): "attempt 2 is not among the ancestors of attempt 3"}
    facts = facts_of(attempts, [(1, 4), *dead])
    assert gone(Policy(), facts) == {pair: f"dead: {why}" for pair, why in dead.items()}
    needed = facts_of(attempts, [(1, 4), *dead], pinned={(1, 6): "for the paper"}, forked={(2, 2): "projects/p/jobs/f"})
    assert kept(Policy(), needed)[(1, 6)] == "pinned: for the paper"
    assert kept(Policy(), needed)[(2, 2)] == "projects/p/jobs/f was forked from it and has not copied it yet"


def test_decide_keeps_what_is_in_use():
    facts = facts_of(ONE, FIVE, used={(1, 2): "it is being verified"})
    assert kept(Policy(keep_latest=1), facts)[(1, 2)] == "in use: it is being verified"


def test_why_dead_before_the_parent_of_its_attempt_names_the_parent():
    attempts = [attempt(1), attempt(2, (1, 4), ((1, 0),))]
    assert why_dead(CheckpointRef(2, 3), attempts, live_chain(attempts)) == (
        "not after the parent of its attempt, attempt 1 step 4"
    )


def test_leftovers_stay_while_a_save_may_be_under_way_and_go_when_none_can_be():
    attempts = [attempt(1), attempt(2, (1, 4), ((1, 0),))]
    facts = facts_of(attempts, [(1, 4), (2, 8)])

    def stays(pair, begun=(), aborted=()):
        refs = [frozenset(CheckpointRef(*each) for each in group) for group in (begun, aborted)]
        return leftover(CheckpointRef(*pair), facts, *refs).stays

    assert stays((2, 10)) and stays((2, 6), begun=[(2, 6)])
    assert not stays((2, 6)) and not stays((2, 10), aborted=[(2, 10)])
    assert not stays((1, 6)) and not stays((1, 6), begun=[(1, 6)])
    assert stays((2, 10), begun=[(2, 10)], aborted=[(2, 10)])


def test_leftover_of_a_parent_whose_manifest_is_not_there_stays():
    facts = facts_of([attempt(1), attempt(2, (1, 4), ((1, 0),))], [(2, 8)])
    assert leftover(CheckpointRef(1, 4), facts, (), ()).why == "attempt 2 started from it"
