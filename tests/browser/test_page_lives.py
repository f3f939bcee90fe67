"""The page over time: what is new, a monitor that is killed, another run, and a very long one."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import closing

import numpy as np
import psutil
import pytest
from looking import browser_cpu_s, losses, place, short_run, steps_of, used_since_s, wait_step
from page_kit import running_monitor

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.attempts import AttemptFacts
from phalanx.monitor.curve import pieces_of, rows_from
from phalanx.monitor.run import Summary
from phalanx.monitor.store import MonitorStore, Position, RunChange, StoredRun
from phalanx.monitor.testing import Told

LONG, LONG_JOB = 100_000, "projects/default/jobs/long"


def test_page_open_shows_new_steps_within_two_seconds(monitor, open_page):
    told = monitor.new_job("live")
    monitor.tell(short_run(told, [3.0] * 10))
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 10)
    took_s = []
    for step in range(11, 16):
        began_s = time.monotonic()
        monitor.tell(losses(told, [2.0], step))
        page.wait_for_function(f"document.getElementById('steps').textContent.startsWith('step {step} ')", timeout=5000)
        took_s.append(time.monotonic() - began_s)
    assert max(took_s) < 2.0
    assert steps_of(page) == list(range(1, 16))


def test_page_of_a_killed_monitor_says_so_and_comes_back_whole(tmp_path, open_page):
    with running_monitor(tmp_path) as monitor:
        told = monitor.new_job("killed")
        monitor.tell(short_run(told, [3.0] * 30))
        page = open_page(f"{monitor.url}#{told.job}")
        wait_step(page, 30)
        page.wait_for_selector("#link:text-is('live')")
        num_events = page.locator("#events li").count()
        for round_ in range(2):
            monitor.kill()
            page.wait_for_selector("#link.lost:has-text('does not answer')")
            monitor.tell(losses(told, [2.5] * 10, 31 + 10 * round_))
            monitor.start()
            wait_step(page, 40 + 10 * round_)
            page.wait_for_selector("#link:text-is('live')")
        assert steps_of(page) == list(range(1, 51))
        assert page.locator("#events li").count() == num_events
        monitor.tell(losses(told, [2.0], 51))
        wait_step(page, 51)


def test_page_switched_between_runs_shows_the_chosen_one_alone(monitor, open_page):
    one, other = monitor.new_job("one"), monitor.new_job("other")
    monitor.tell([*short_run(one, [7.0] * 12), *short_run(other, [5.0] * 34)])
    monitor.wait_step(other, 34)
    page = open_page(f"{monitor.url}#{one.job}")
    wait_step(page, 12)
    page.select_option("#runs", other.job)
    wait_step(page, 34)
    assert page.inner_text("#tile-loss") == "5"
    assert page.evaluate("location.hash") == f"#{other.job}"
    monitor.tell(losses(one, [6.0], 13))
    page.evaluate(f"location.hash = '#{one.job}'")
    wait_step(page, 13)
    assert page.inner_text("#tile-loss") == "6"
    assert page.locator("#runs").input_value() == one.job


def test_page_that_nobody_sees_holds_no_stream_and_catches_up(monitor, open_page):
    told = monitor.new_job("hidden")
    monitor.tell(short_run(told, [3.0] * 5))
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 5)
    hide = (
        "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.evaluate(hide, True)
    assert page.evaluate("phalanx.run.unfollow") is None
    monitor.tell(losses(told, [2.0] * 5, 6))
    monitor.wait_step(told, 10)
    assert page.evaluate("phalanx.run.series.length") == 5
    page.evaluate(hide, False)
    wait_step(page, 10)
    assert steps_of(page) == list(range(1, 11))


@pytest.fixture(scope="module")
def long_monitor(tmp_path_factory):
    """A monitor that has measured 100,000 steps of a run before it was last ended."""
    folder = tmp_path_factory.mktemp("long")
    steps = np.arange(1, LONG + 1)
    loss = 1.7 + 9 / np.sqrt(steps) + np.random.default_rng(0).normal(0, 0.02, LONG)
    columns = {"step": steps, "loss": loss, "step_time_s": np.full(LONG, 0.5), "attempt": np.ones(LONG)}
    for name in ("tokens_per_second", "gradient_norm", "data_wait_s", "learning_rate"):
        columns[name] = 1 + loss / 10
    summary = Summary(LONG_JOB, train_pb.JOB_STATE_RUNNING, LONG, 2 * LONG, attempt=1)
    run = StoredRun(summary, 0, {1: AttemptFacts(1, last_step=LONG)}, {})
    with closing(MonitorStore(f"sqlite:///{folder}/monitor.sqlite")) as store:
        store.save(Position(), [RunChange(run, 0, pieces_of(rows_from(columns, LONG)))])
    with running_monitor(folder) as running:
        yield running


def test_page_of_a_long_run_loads_and_draws_quickly(long_monitor, browser, open_page):
    """Loading is measured as processor time of browser and monitor, whatever else the machine does meanwhile."""
    monitor = psutil.Process(long_monitor.process.pid)
    monitor_before, before = monitor.cpu_times(), browser_cpu_s(browser)
    page = open_page(f"{long_monitor.url}#{LONG_JOB}")
    page.wait_for_function(f"globalThis.phalanx?.charts[0].series.length >= {LONG} && phalanx.charts[0].drawn > 0")
    monitor_after, page_s = monitor.cpu_times(), used_since_s(browser, before)
    monitor_s = monitor_after.user + monitor_after.system - monitor_before.user - monitor_before.system
    assert 0 < page_s < 5.0 - monitor_s, (page_s, monitor_s)
    draws_ms = page.evaluate(
        "Array.from({ length: 20 }, () => { const chart = phalanx.charts[0], began = performance.now();"
        " chart.kept = null; chart.draw(); return performance.now() - began; })"
    )
    assert statistics.median(draws_ms) < 25, draws_ms


def test_page_of_a_long_run_stays_smooth_while_it_grows_and_is_dragged(long_monitor, browser, open_page):
    """A frame costs little processor time, all that the browser does counted."""
    page = open_page(f"{long_monitor.url}#{LONG_JOB}")
    page.wait_for_function(f"globalThis.phalanx?.charts[0].series.length >= {LONG} && phalanx.charts[0].drawn > 0")
    told, stop = Told(LONG_JOB), threading.Event()

    def grow() -> None:
        step = LONG
        while not stop.wait(0.1):
            step += 1
            long_monitor.tell(losses(told, [2.0], step))

    page.evaluate(
        "globalThis.frames_ = 0; (function next() { requestAnimationFrame(() => { frames_ += 1; next(); }); })()"
    )
    before = browser_cpu_s(browser)
    growing = threading.Thread(target=grow)
    growing.start()
    try:
        page.mouse.move(*place(page, 20_000))
        page.mouse.down()
        for step in range(20_000, 80_000, 1000):
            page.mouse.move(*place(page, step))
        page.mouse.up()
        page.wait_for_function(f"phalanx.run.series.last('step') > {LONG + 5}")
    finally:
        stop.set()
        growing.join()
    low, high = page.evaluate("phalanx.span.range")
    assert (low, high) == (pytest.approx(20_000, rel=0.02), pytest.approx(79_000, rel=0.02))
    used_s, num_frames = used_since_s(browser, before), page.evaluate("frames_")
    assert num_frames > 10 and 0 < used_s / num_frames < 0.1, (used_s, num_frames)
