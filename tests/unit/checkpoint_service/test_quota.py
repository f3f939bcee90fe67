"""Which regular and speculative checkpoints the job's own quotas keep, and the words for it."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import CODE, IDENTITY

from phalanx.checkpoint.facts import Facts, Policy
from phalanx.checkpoint.retention import decide, resume_why
from phalanx.lineage import Attempt, CheckpointRef, live_chain

ONE = Attempt(1, None, (), IDENTITY, CODE, IDENTITY, {}, "r1")


def refs(*steps):
    return frozenset(CheckpointRef(1, step) for step in steps)


def facts_of(steps, speculative=(), promoted=(), unhealthy=(), **fields):
    return Facts(
        live_chain([ONE]),
        (ONE,),
        refs(*steps),
        speculative=refs(*speculative),
        promoted=refs(*promoted),
        unhealthy=dict.fromkeys(refs(*unhealthy), "a spike"),
        **fields,
    )


def split(policy, facts):
    """Steps that stay, and steps that go, with the reasons."""
    decided = decide(policy, facts)
    return {d.ref.step: d.why for d in decided if d.stays}, {d.ref.step: d.why for d in decided if not d.stays}


LOSSES = {CheckpointRef(1, step): loss for step, loss in {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.0, 10: 5.0}.items()}


def test_best_by_a_metric_stay_beside_the_newest_and_of_equal_ones_the_newer():
    facts = facts_of((2, 4, 6, 8, 10), measured=LOSSES)
    stays, goes = split(Policy(keep_latest=1, keep_best=1), facts)
    assert stays == {
        8: "among the best 1 by loss (checkpoint.keep_best_m): 1",
        10: "the newest live checkpoint",
    }
    assert goes.keys() == {2, 4, 6}
    assert split(Policy(keep_latest=1, keep_best=3), facts)[0].keys() == {4, 6, 8, 10}
    most = Policy(keep_latest=1, keep_best=2, best_by="accuracy", best_order="max")
    assert split(most, facts)[0][2] == "among the best 2 by accuracy (checkpoint.keep_best_m): 3"


def test_best_counts_neither_the_damaged_nor_those_of_which_nothing_is_known():
    measured = {ref: loss for ref, loss in LOSSES.items() if ref.step != 4}
    facts = facts_of((2, 4, 6, 8, 10), measured=measured, damaged={CheckpointRef(1, 8): "flipped"})
    assert split(Policy(keep_latest=1, keep_best=1), facts)[0].keys() == {6, 10}


def test_speculative_ones_do_not_take_the_places_of_regular_ones_and_have_their_own():
    facts = facts_of((10, 12, 14, 20, 22, 24, 26), speculative=(12, 14, 22, 24, 26))
    stays, goes = split(Policy(keep_latest=2, keep_speculative=2), facts)
    assert stays == {
        10: "among the newest 2 (checkpoint.keep_latest_k)",
        12: "the speculative checkpoint that is next to be found healthy",
        20: "among the newest 2 (checkpoint.keep_latest_k)",
        26: "the newest live checkpoint",
    }
    assert goes[22] == "speculative, and more than 2 of them wait (checkpoint.speculative_keep_k)"
    assert split(Policy(keep_latest=0), facts)[0].keys() == {10, 12, 20, 26}
    every = Policy(keep_latest=1, keep_every=2, keep_best=9)
    assert split(every, facts)[0].keys() == {10, 12, 20, 26}


def test_without_a_verdict_the_last_promoted_stays_and_a_newer_one_takes_its_place():
    before = facts_of((12, 14, 16, 20), speculative=(12, 14, 16), promoted=(12,))
    stays, goes = split(Policy(keep_latest=1), before)
    assert stays[12] == "the last speculative checkpoint that was found healthy" == resume_why(*refs(12), before)
    assert stays[14] == "the speculative checkpoint that is next to be found healthy"
    assert goes.keys() == {16}
    after = facts_of((12, 14, 16, 20), speculative=(12, 14, 16), promoted=(12, 14))
    stays, goes = split(Policy(keep_latest=1), after)
    assert stays.keys() == {14, 16, 20}
    assert goes[12] == "speculative, and older than the last one that was found healthy, attempt 1 step 14"


def test_unhealthy_ones_go_unless_they_are_the_newest_and_do_not_wait():
    facts = facts_of((12, 14, 16), speculative=(12, 14, 16), unhealthy=(12, 16))
    stays, goes = split(Policy(keep_latest=1), facts)
    assert stays.keys() == {14, 16} and stays[16] == "the newest live checkpoint"
    assert goes == {12: "speculative, and not healthy: a spike"}


def test_newest_good_one_stays_even_where_it_is_speculative_and_unhealthy():
    """Case 4: the only good one stays, whatever its verdict: there is nothing else to go on from."""
    facts = facts_of((14, 16), (14, 16), unhealthy=(14,), damaged={CheckpointRef(1, 16): "flipped"})
    stays, _ = split(Policy(keep_latest=1), facts)
    assert stays[14] == "the newest live checkpoint that is not damaged" and stays.keys() == {14, 16}


def test_damaged_promoted_one_is_no_promoted_one():
    facts = facts_of((12, 14, 16, 18), (12, 14, 16), promoted=(12, 14), damaged={CheckpointRef(1, 14): "flipped"})
    stays, goes = split(Policy(keep_latest=1), facts)
    assert stays.keys() == {12, 16, 18} and goes == {14: "damaged: flipped"}


STEPS = st.frozensets(st.integers(1, 30), min_size=1, max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    STEPS,
    STEPS,
    STEPS,
    STEPS,
    STEPS,
    st.dictionaries(st.integers(1, 30), st.floats(-5, 5)),
    st.builds(
        Policy,
        keep_latest=st.integers(0, 3),
        keep_every=st.sampled_from([0, 4]),
        keep_best=st.integers(0, 3),
        best_order=st.sampled_from(["min", "max"]),
        keep_speculative=st.integers(1, 3),
    ),
)
def test_quotas_hold_whatever_is_there(steps, speculative, promoted, unhealthy, damaged, measured, policy):
    """Case 4: said again, independently: the newest, the newest good one, the k newest, each n-th, the m best, the last
    promoted; and of speculative ones no more than the quota.
    """
    facts = facts_of(
        steps,
        speculative & steps,
        promoted & speculative & steps,
        unhealthy,
        damaged=dict.fromkeys(refs(*damaged), "flipped"),
        measured={CheckpointRef(1, step): value for step, value in measured.items()},
    )
    stays = set(split(policy, facts)[0])
    live, good = sorted(steps), sorted(steps - damaged)
    regular = [step for step in good if step not in speculative]
    assert live[-1] in stays and set(good[-1:]) <= stays
    if policy.keep_latest == 0:
        assert steps - speculative <= stays
    else:
        assert set(regular[-policy.keep_latest :]) <= stays
    assert not policy.keep_every or {step for step in regular if step % policy.keep_every == 0} <= stays
    values = sorted((measured[step] for step in regular if step in measured), reverse=policy.best_order == "max")
    if policy.keep_latest and policy.keep_best and values:
        best = values[: policy.keep_best][-1]
        better = {s for s in regular if s in measured and (measured[s] < best) == (policy.best_order == "min")}
        assert {step for step in better if measured[step] != best} <= stays
    last = max(good_promoted := [step for step in good if step in promoted & speculative], default=0)
    assert not good_promoted or last in stays
    waiting = [step for step in stays & speculative - {last} if step not in (live[-1], *good[-1:])]
    assert len(waiting) <= policy.keep_speculative and all(step > last for step in waiting)
    in_line = [step for step in good if step in speculative - promoted - unhealthy and step > last]
    assert set(in_line[:1]) <= stays
