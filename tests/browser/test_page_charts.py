"""The charts: what is drawn where, and what a hand does with them."""

from __future__ import annotations

import pytest
from looking import LOSS, SPEED, drag, ink, losses, place, short_run, steps_of, wait_step

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.monitor.testing import run_with_recovery, started

NUM_STEPS, LOST, SAVED = 200, 130, 120


@pytest.fixture(scope="module")
def charted(monitor):
    """200 steps, with a node lost at step 120 and the run gone on from there."""
    told = monitor.new_job("charted", NUM_STEPS)
    monitor.tell(run_with_recovery(told.job, NUM_STEPS, told))
    monitor.wait_step(told, NUM_STEPS)
    return told


@pytest.fixture
def page(monitor, charted, open_page):
    page = open_page(f"{monitor.url}#{charted.job}")
    wait_step(page, NUM_STEPS)
    return page


def opened(monitor, open_page, uid, values):
    """A page of a new run with these losses."""
    told = monitor.new_job(uid, len(values))
    monitor.tell(short_run(told, values))
    monitor.wait_step(told, len(values))
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, len(values))
    return page, told


def test_chart_of_losses_draws_the_line_over_the_whole_run(page):
    tenths = [ink(page, "--train", first, first + 20) for first in range(1, NUM_STEPS - 20, 20)]
    assert all(each.count > 20 for each in tenths)
    assert tenths[0].top < tenths[-1].top - 50, "the loss falls"
    assert ink(page, "--train", 1, NUM_STEPS, SPEED).count > 50


def test_chart_of_a_loss_that_is_no_number_has_a_gap(monitor, open_page):
    page, _ = opened(monitor, open_page, "gap", [3.0] * 25 + [None] + [3.0] * 24)
    assert ink(page, "--train", 25.3, 26.7).count == 0
    assert ink(page, "--train", 24, 25).count > 10 and ink(page, "--train", 27, 28).count > 10
    assert ink(page, "--incident", 25.8, 26.2).count > 20


def test_chart_of_many_steps_shows_the_one_spike(monitor, open_page):
    values = [2.0] * 8000
    values[5344] = 9.0
    page, _ = opened(monitor, open_page, "spike", values)
    spike, beside = ink(page, "--train", 5320, 5370), ink(page, "--train", 4500, 5200)
    assert spike.top < 40 and beside.top > 200


def test_chart_hovered_says_what_is_marked_there(page):
    page.mouse.move(*place(page, SAVED + 1))
    page.wait_for_selector("#loss .tip:not([hidden])")
    said = page.inner_text("#loss .tip")
    assert "node loss: node-b is not heard" in said and "attempt 2 from step 120" in said
    assert page.inner_text("#loss output").startswith("step 121: ")
    assert page.inner_text("#speed output").startswith("step 121: "), "charts share the cursor"
    page.mouse.move(*place(page, 60))
    page.wait_for_selector("#loss .tip", state="hidden")


def test_chart_of_evaluations_draws_dots(page):
    for step in (40, 80, 160):
        assert ink(page, "--held-out", step - 1, step + 1).count > 15
    assert ink(page, "--held-out", 50, 70).count == 0
    page.mouse.move(*place(page, 80))
    page.wait_for_selector("#loss .tip:has-text('held-out loss at step 80')")


def test_chart_marks_where_an_attempt_began(page):
    page.evaluate("phalanx.span.show([110, 130])")
    assert ink(page, "--attempt", SAVED - 0.2, SAVED + 0.2).count > 20
    assert ink(page, "--incident", SAVED + 0.8, SAVED + 1.2).count > 20
    assert ink(page, "--attempt", 112, 118).count == 0


def test_chart_dragged_shows_that_span_and_double_clicked_the_whole(page):
    drag(page, 50, 100)
    low, high = page.evaluate("phalanx.span.range")
    assert low == pytest.approx(50, abs=2) and high == pytest.approx(100, abs=2)
    page.wait_for_function("phalanx.charts.every((chart) => chart.shown.from > 40)")
    assert ink(page, "--train", 50, 100).count > 500
    page.mouse.dblclick(*place(page, 75))
    assert page.evaluate("phalanx.span.range") is None
    drag(page, 20, 30, SPEED)
    page.click("#reset")
    assert page.evaluate("phalanx.span.range") is None


def test_chart_of_logarithms_spreads_small_losses(page):
    before = ink(page, "--train", 150, NUM_STEPS)
    page.check("#log")
    page.wait_for_function("phalanx.charts[0].shown.isLog")
    after = ink(page, "--train", 150, NUM_STEPS)
    assert after.bottom - after.top > before.bottom - before.top
    assert not page.evaluate("phalanx.charts[1].shown.isLog")


def test_chart_smoothed_is_calm_and_keeps_the_values_faintly(monitor, open_page):
    page, _ = opened(monitor, open_page, "noisy", [3.0 + (step % 2) for step in range(200)])
    before = ink(page, "--train", 100, 200)
    page.fill("#smoothing", "0.95")
    page.wait_for_function("phalanx.charts[0].weight === 0.95")
    after = ink(page, "--train", 100, 200)
    assert before.bottom - before.top > 200 and 0 < after.bottom - after.top < 60
    assert page.evaluate("phalanx.charts[0].kept.layers.map((layer) => layer.alpha)") == [0.25, 1]


def test_chart_of_steps_done_again_shows_the_newer_ones(monitor, open_page):
    page, told = opened(monitor, open_page, "again", [3.0] * 60)
    evaluation = record_pb.Evaluation(step=55, loss=3.1)
    monitor.tell([told.record(evaluation=evaluation), told.record(committed=record_pb.Committed(attempt=1, step=40))])
    page.wait_for_function("phalanx.run.evaluations.size === 1")
    monitor.tell([*started(told, 2, attempt=2, start_step=40), *losses(told, [5.0] * 10, 41)])
    wait_step(page, 50)
    assert steps_of(page) == list(range(1, 51))
    assert page.evaluate("phalanx.run.series.columns.loss[45]") == 5
    assert page.evaluate("phalanx.run.evaluations.size") == 0
    assert page.evaluate("phalanx.charts[0].bands.map(({ from, to }) => [from, to])") == [[40, 60]]
    page.reload()
    wait_step(page, 50)
    assert steps_of(page) == list(range(1, 51))
    assert ink(page, "--train", 42, 50, LOSS).top < ink(page, "--train", 1, 38, LOSS).top
