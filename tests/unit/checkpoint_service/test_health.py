"""Verdicts on speculative checkpoints: from figures alone, and from what a job's storage holds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from support.checkpoints import open_attempt, save

from phalanx.checkpoint.facts import Policy
from phalanx.checkpoint.health import Health, Trouble, verdict
from phalanx.checkpoint.looking import Looker
from phalanx.core.step_parts import Part
from phalanx.lineage import CheckpointRef, Lineage, StepRows, keys
from phalanx.lineage.events import Cause, EventLog, EventType, JobEvent, JobState
from phalanx.lineage.step_records import StepRecords
from phalanx.objects import open_store


def steady(first, last, loss=2.0):
    return dict.fromkeys(range(first, last + 1), loss)


def test_verdict_waits_for_the_steps_behind_and_then_is_healthy():
    assert verdict(10, steady(1, 13), (), 4).health is Health.WAITING
    found = verdict(10, steady(1, 14), (), 4)
    assert found.health is Health.HEALTHY and found.why == "4 healthy steps behind it, median loss 2"
    assert verdict(10, steady(11, 14), (), 4).health is Health.HEALTHY


@pytest.mark.parametrize(
    "losses, troubles, why",
    [
        (steady(1, 11) | {12: math.nan}, (), "a step up to 14 was not finite"),
        (steady(1, 10) | steady(11, 14, 2.2), (), "the loss climbed from 2 before it to 2.2 behind it"),
        (steady(1, 10, -2.0) | steady(11, 14, -1.8), (), "the loss climbed from -2 before it to -1.8 behind it"),
        (steady(1, 14), [Trouble("spike", 13, 15)], "the monitor told a spike in steps 13 to 15"),
        (steady(1, 14), [Trouble("divergence", 2, 10)], "the monitor told a divergence in steps 2 to 10"),
    ],
)
def test_verdict_is_unhealthy_where_something_went_wrong_near_it(losses, troubles, why):
    found = verdict(10, losses, troubles, 4)
    assert (found.health, found.why) == (Health.UNHEALTHY, why)


@pytest.mark.parametrize("trouble", [Trouble("spike", 3, 9), Trouble("nan", 15, 16)])
def test_verdict_does_not_ask_of_what_was_over_before_or_came_later(trouble):
    assert verdict(10, steady(1, 14), [trouble], 4).health is Health.HEALTHY


@pytest.fixture
def store():
    return open_store("memory://").within("projects/p/jobs/j")


def put_losses(store, attempt, losses, monkeypatch, overflows=(), scale=8.0):
    """From here on the records of a save hold these losses. overflows: steps with a gradient norm that is not finite,
    under a loss scale.
    """

    def put(records, attempt_, rank, first, last, windows, steps):
        found = np.array([losses[step] for step in range(first, last + 1)])
        column = np.arange(first, last + 1, dtype=np.int64)
        zeros = np.zeros(len(column))
        norms = np.where(np.isin(column, overflows), np.inf, 1.0)
        rows = StepRows(column, found, norms, np.zeros(len(column), np.int64), zeros, *[zeros] * len(Part))
        rows = replace(rows, loss_scale=zeros + scale) if overflows else rows
        return real(records, attempt_, rank, first, last, windows, rows)

    real = StepRecords.put
    monkeypatch.setattr(StepRecords, "put", put)


def at(step, attempt=1):
    return CheckpointRef(attempt, step)


POLICY = Policy(keep_latest=1, keep_best=1, healthy_steps=4)


def look(store, policy=POLICY):
    return Looker(store).look(policy, pinned={})


def saved(store, *steps, speculative=(), attempt=1, before=0):
    for step in steps:
        save(store, at(step, attempt), first_step=before + 1, speculative=step in speculative)
        before = step


def test_speculative_checkpoint_is_promoted_by_the_steps_recorded_behind_it(store, monkeypatch):
    put_losses(store, 1, steady(1, 40), monkeypatch)
    open_attempt(store)
    saved(store, 4, 6, 8, speculative=(6,))
    assert look(store).promotions == {}
    saved(store, 10, before=8)
    outlook = look(store)
    assert outlook.promotions == {at(6): "4 healthy steps behind it, median loss 2"}
    assert outlook.facts.promoted == {at(6)} == outlook.facts.speculative


@pytest.mark.parametrize(("scale", "is_promoted"), [(8.0, True), (1.0, False)])
def test_overflow_of_float16_is_told_from_a_step_that_is_not_finite(store, monkeypatch, scale, is_promoted):
    """With a scale that can fall no further it is one."""
    put_losses(store, 1, steady(1, 40), monkeypatch, overflows=(7, 9), scale=scale)
    open_attempt(store)
    saved(store, 4, 6, 8, 10, speculative=(6,))
    outlook = look(store)
    assert (at(6) in outlook.promotions) == is_promoted
    assert outlook.facts.unhealthy == ({} if is_promoted else {at(6): "a step up to 10 was not finite"})


def test_steps_of_removed_checkpoints_count_as_their_records_stay(store, monkeypatch):
    put_losses(store, 1, steady(1, 40), monkeypatch)
    open_attempt(store)
    saved(store, 4, 6, 8, 10, speculative=(6,))
    Lineage(store).retire(at(8))
    for info in list(store.list(keys.checkpoint(at(8)))):
        if info.key != keys.retired(at(8)):
            store.delete(info.key)
    assert look(store).promotions.keys() == {at(6)}


def test_loss_of_a_checkpoint_is_the_mean_of_the_last_steps_that_were_finite(store, monkeypatch):
    losses = {step: float(step) for step in range(1, 21)} | {3: math.nan}
    put_losses(store, 1, losses, monkeypatch)
    open_attempt(store)
    saved(store, 4, 10, 20, speculative=(10,))
    assert look(store).facts.measured == {at(4): 7 / 3, at(20): pytest.approx((210 - 3) / 19)}
    assert look(store, Policy(keep_latest=1)).facts.measured == {}


def test_metric_of_the_manifest_tells_the_best(store):
    open_attempt(store)
    save(store, at(2), metrics={"validation_loss": 1.5})
    save(store, at(4))
    policy = Policy(keep_latest=1, keep_best=1, best_by="validation_loss")
    assert look(store, policy).facts.measured == {at(2): 1.5}


def test_records_that_rotted_promote_nothing_and_measure_nothing(store, monkeypatch, caplog):
    put_losses(store, 1, steady(1, 40), monkeypatch)
    open_attempt(store)
    saved(store, 4, 6, 8, 10, speculative=(6,))
    key = next(info.key for info in store.list("a00000001/records/s00000007"))
    store.delete(key)
    outlook = look(store)
    assert outlook.promotions == {} and "cannot be told" in outlook.facts.unhealthy[at(6)]
    assert outlook.facts.measured.keys() == {at(4)} and "is not known" in caplog.text


def incident(store, number, attempt, first, last, kind="spike"):
    data = {"action": "notify", "first_step": first, "last_step": last}
    event = JobEvent(
        number, EventType.INCIDENT, JobState.RUNNING, "now", f"w{number}", attempt, cause=Cause(kind), data=data
    )
    assert EventLog(store).append(event)


def test_incident_that_the_monitor_told_keeps_a_checkpoint_from_its_promotion(store, monkeypatch):
    put_losses(store, 1, steady(1, 40), monkeypatch)
    open_attempt(store)
    saved(store, 4, 6, 8, 10, 12, 14, 16, 18, speculative=(6, 12))
    incident(store, 1, 1, 5, 6)
    incident(store, 2, 1, 5, 20, kind="hang")
    outlook = look(store)
    assert outlook.facts.unhealthy[at(6)] == "the monitor told a spike in steps 5 to 6"
    assert outlook.promotions.keys() == {at(12)}


def test_incident_of_steps_that_were_taken_back_counts_no_more(store, monkeypatch):
    """The job went back to the speculative checkpoint itself: what it did behind it then is the course that counts."""
    put_losses(store, 1, steady(1, 40), monkeypatch)
    open_attempt(store)
    saved(store, 4, 6, speculative=(6,))
    incident(store, 1, 1, 7, 9)
    open_attempt(store)
    saved(store, 8, 10, attempt=2, before=6)
    assert look(store).promotions.keys() == {at(6)}
