"""The queue: exact counts, and steps that never wait."""

import threading
import time

import pytest

from phalanx.telemetry import SinkQueue


class Recorder:
    """A sink in memory that can be told to fail or to block."""

    name = "recorder"

    def __init__(self, newest=-1, fail_on=(), fail_open=False, gate=None):
        self.rows, self.newest, self.fail_on, self.fail_open = [], newest, set(fail_on), fail_open
        self.gate, self.entered, self.flushed, self.closed = gate, threading.Event(), 0, False

    def open(self, run_id, config):
        if self.fail_open:
            raise OSError("no server")
        return self.newest

    def log(self, step, values):
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        if step in self.fail_on:
            raise OSError(f"step {step}")
        self.rows.append((step, values))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True


def test_queue_rows_arrive_in_order_and_are_counted():
    sink = Recorder()
    queue = SinkQueue(sink, "run", {})
    for step in range(100):
        queue.put(step, {"loss": float(step)})
    counts = queue.close(10.0)
    assert sink.rows == [(step, {"loss": float(step)}) for step in range(100)]
    assert (counts.logged, counts.dropped, counts.waiting, counts.put) == (100, 0, 0, 100)
    assert sink.closed


def test_queue_replayed_steps_are_not_logged_twice():
    sink = Recorder(newest=4)
    queue = SinkQueue(sink, "run", {})
    for step in [3, 4, 5, 6, 5, 6, 7]:
        queue.put(step, {})
    counts = queue.close(10.0)
    assert [step for step, _ in sink.rows] == [5, 6, 7]
    assert (counts.logged, counts.replayed) == (3, 4)


def test_queue_sink_that_hangs_never_slows_a_put_and_every_drop_is_counted():
    gate = threading.Event()
    sink = Recorder(gate=gate)
    queue = SinkQueue(sink, "run", {}, capacity=10)
    queue.put(0, {})
    assert sink.entered.wait(10.0)
    slowest_s = 0.0
    for step in range(1, 1001):
        start_s = time.perf_counter()
        queue.put(step, {"loss": 1.0})
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
    counts = queue.counts
    assert (counts.waiting, counts.dropped, counts.put) == (11, 990, 1001)
    assert slowest_s < 0.5
    assert queue.flush(0.05) is False
    gate.set()
    counts = queue.close(10.0)
    assert (counts.logged, counts.dropped, counts.waiting) == (11, 990, 0)
    assert [step for step, _ in sink.rows] == list(range(11))


def test_queue_close_of_a_hanging_sink_keeps_its_deadline():
    gate = threading.Event()
    sink = Recorder(gate=gate)
    queue = SinkQueue(sink, "run", {})
    for step in range(5):
        queue.put(step, {})
    assert sink.entered.wait(10.0)
    start_s = time.monotonic()
    counts = queue.close(0.2)
    assert time.monotonic() - start_s < 5.0
    assert (counts.logged, counts.dropped, counts.waiting) == (0, 5, 0)
    assert "did not close" in counts.failure
    gate.set()
    queue._thread.join(10.0)
    assert queue.counts == counts  # the abandoned row is not counted again


def test_queue_one_failure_costs_one_row():
    sink = Recorder(fail_on={3})
    queue = SinkQueue(sink, "run", {})
    for step in range(6):
        queue.put(step, {})
    counts = queue.close(10.0)
    assert (counts.logged, counts.dropped, counts.failure) == (5, 1, "")


def test_queue_three_failures_in_a_row_turn_the_sink_off():
    sink = Recorder(fail_on={0, 1, 3, 4, 5})
    queue = SinkQueue(sink, "run", {})
    for step in range(20):
        queue.put(step, {})
    counts = queue.close(10.0)
    assert [step for step, _ in sink.rows] == [2]
    assert (counts.logged, counts.dropped, counts.put) == (1, 19, 20)
    assert "step 5" in counts.failure
    queue.put(99, {})
    assert queue.counts.dropped == 20


def test_queue_sink_that_does_not_open_is_off():
    queue = SinkQueue(Recorder(fail_open=True), "run", {})
    queue.put(0, {})
    assert queue.flush(5.0) is False
    queue.put(1, {})
    counts = queue.close(5.0)
    assert (counts.logged, counts.dropped) == (0, 2)
    assert "no server" in counts.failure


def test_queue_flush_waits_for_what_was_put():
    sink = Recorder()
    queue = SinkQueue(sink, "run", {})
    for step in range(500):
        queue.put(step, {})
    assert queue.flush(10.0) is True
    assert len(sink.rows) == 500 and sink.flushed >= 1
    queue.close(5.0)


@pytest.mark.parametrize("num_threads", [4])
def test_queue_puts_from_many_threads_are_all_accounted_for(num_threads):
    sink = Recorder()
    queue = SinkQueue(sink, "run", {}, capacity=50)
    threads = [
        threading.Thread(target=lambda: [queue.put(step, {}) for step in range(500)]) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = queue.close(10.0)
    assert counts.put == 500 * num_threads and counts.waiting == 0
    assert counts.logged == len(sink.rows)


class Returning(Recorder):
    """A sink whose other end is away until it is back."""

    longest_pause_s = 0.01

    def __init__(self, *, opens=True):
        super().__init__()
        self.is_back, self.opens, self.tries = threading.Event(), opens, 0

    def open(self, run_id, config):
        if not self.opens and not self.is_back.is_set():
            raise OSError("no server")
        return -1

    def log(self, step, values):
        self.tries += 1
        if not self.is_back.is_set():
            raise OSError("away")
        self.rows.append((step, values))


def until(condition):
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.mark.parametrize("opens", [True, False])
def test_queue_of_a_sink_that_comes_back_tries_on_and_counts_exactly_what_found_no_room(opens, caplog):
    sink = Returning(opens=opens)
    queue = SinkQueue(sink, "run", {}, capacity=10)
    until(lambda: queue.counts.waiting == 0)
    for step in range(100):
        queue.put(step, {})
    until(lambda: sink.tries > 20 or not opens)
    counts = queue.counts
    assert counts.failure == "" and counts.logged == 0
    assert counts.dropped + counts.waiting == counts.put == 100 and 10 <= counts.waiting <= 11
    sink.is_back.set()
    until(lambda: queue.counts.waiting == 0)
    queue.put(100, {})
    counts = queue.close(10.0)
    assert counts.logged == len(sink.rows) and counts.logged + counts.dropped == 101
    assert [step for step, _ in sink.rows][-1] == 100
    assert sum("is away" in record.message for record in caplog.records) == 1, "told once, however often it is tried"


def test_queue_of_a_sink_that_is_away_closes_within_its_deadline_and_drops_what_waits():
    sink = Returning()
    sink.longest_pause_s = 60.0
    queue = SinkQueue(sink, "run", {})
    for step in range(5):
        queue.put(step, {})
    until(lambda: sink.tries > 0)
    began_s = time.monotonic()
    counts = queue.close(10.0)
    assert time.monotonic() - began_s < 5.0
    assert (counts.logged, counts.dropped, counts.waiting) == (0, 5, 0) and "away" in counts.failure


def test_queue_of_a_sink_that_is_away_flushes_once_it_is_back():
    sink = Returning()
    queue = SinkQueue(sink, "run", {})
    queue.put(1, {})
    assert not queue.flush(0.1)
    sink.is_back.set()
    assert queue.flush(10.0) and sink.flushed == 1
    queue.close(10.0)
