"""What the loop does where a step can't be taken as planned."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.core.step_parts import Part, StepParts
from phalanx.stream import DamagedShard
from phalanx.trainer.control import Orders, Superseded
from phalanx.trainer.loop import RolledBack, Word, refuse_update, take
from phalanx.trainer.recorder import StepResult
from phalanx.trainer.step_times import EVERY_STEPS, StepTimes

DAMAGE = DamagedShard(shard=3, name="s3", member=1, offset=512, key="s3.tar", why="has another digest")
PARTS = StepParts.of({Part.DATA: 0.125, Part.FORWARD: 0.375})
WHY = "member 1 at byte 512: has another digest"


class Bench:
    """A session whose feed fails `num_failures` times, and whose control gives or raises `answer`."""

    def __init__(self, num_failures: int, answer: bool | Exception) -> None:
        self.num_failures, self.answer = num_failures, answer
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.step = 7
        self.feed = SimpleNamespace(take=self._take)
        self.control = SimpleNamespace(report_shard=self._report_shard)
        self.reading = SimpleNamespace(key_of=lambda shard, key: key)

    def report(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def _take(self, step: int) -> str:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise DAMAGE
        return f"input of {step}"

    def _report_shard(self, key: str, why: str, step: int) -> bool:
        assert (key, why, step) == ("s3.tar", WHY, 7)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def taken(bench: Bench) -> object:
    return take(bench)  # type: ignore[arg-type]


def test_damage_that_was_a_passing_fault_is_read_again() -> None:
    bench = Bench(1, True)
    assert taken(bench) == "input of 7"
    assert bench.told == [("bad_shard", {"shard": "s3.tar", "why": WHY, "step": 7})]


@pytest.mark.parametrize(("num_failures", "answer"), [(2, True), (1, False), (1, OutsideError("data is away"))])
def test_damage_that_stays_or_is_not_decided_ends_the_attempt_by_name(num_failures: int, answer: bool) -> None:
    with pytest.raises(DamagedShard, match="s3"):
        taken(Bench(num_failures, answer))


@pytest.mark.parametrize("error", [Superseded, PhalanxError])
def test_refused_report_is_told_in_its_own_words(error: type[PhalanxError]) -> None:
    with pytest.raises(error, match="attempt 1"):
        taken(Bench(1, error("attempt 1", expected="the newest", remedy="nothing")))


def test_step_time_tells_every_few_steps_what_this_rank_worked_and_waited_for_data() -> None:
    told: list[dict[str, Any]] = []
    times = StepTimes(lambda kind, **fields: told.append({"kind": kind, **fields}))
    for step in range(1, 2 * EVERY_STEPS + 1):
        with times.work(step):
            sum(range(3_000_000))  # longer than a tick of the scheduler, which counts the time
        times.tell(StepResult(step, 1.0, 1.0, 8, 0.5, PARTS), 0.25)
    assert [(each["kind"], each["step"], each["step_time_s"]) for each in told] == [
        ("step_time", EVERY_STEPS, 0.5),
        ("step_time", 2 * EVERY_STEPS, 0.5),
    ]
    assert all(each["busy_s"] > 0.375 for each in told)
    assert all(each["parts"]["data_wait_s"] == 0.125 and sum(each["parts"].values()) == 0.5 for each in told)


def test_step_times_without_a_report_cost_nothing_and_tell_nothing() -> None:
    times = StepTimes(None)
    with times.work(EVERY_STEPS):
        pass
    times.tell(StepResult(EVERY_STEPS, 1.0, 1.0, 8, 0.5, PARTS), 0.25)


class Diverging:
    """A session whose steps give nothing finite. rolls_back: what its control says."""

    def __init__(self, on_nan: str, *, rolls_back: bool) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[int, int]] = []
        self.finished = 0
        self.step = 0
        self.not_finite_since: int | None = None
        job = SimpleNamespace(training=SimpleNamespace(non_finite="skip"), recovery=SimpleNamespace(on_nan=on_nan))
        self.prepared = SimpleNamespace(job=job)
        self.control = SimpleNamespace(roll_back=lambda first, last: self.asked.append((first, last)) or rolls_back)
        self.saver = SimpleNamespace(finish=self._finish)

    def report(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def _finish(self) -> None:
        self.finished += 1

    def take(self, step: int) -> None:
        self.step = step
        refuse_update(self, Word(math.nan, (1.0,), Orders.NONE, False))  # type: ignore[arg-type]


def test_third_step_in_a_row_without_finite_numbers_goes_back_behind_all_of_them() -> None:
    session = Diverging("roll_back", rolls_back=True)
    session.take(5)
    session.take(6)
    assert session.asked == []
    with pytest.raises(RolledBack, match="steps 5 to 7 "):
        session.take(7)
    assert session.asked == [(5, 7)] and session.finished == 1, "what was saved before is committed"


@pytest.mark.parametrize(("on_nan", "num_asked"), [("roll_back", 3), ("skip", 0), ("notify", 0)])
def test_steps_without_finite_numbers_are_left_out_where_others_decide(on_nan: str, num_asked: int) -> None:
    session = Diverging(on_nan, rolls_back=False)
    for step in range(1, 6):
        session.take(step)
    assert len(session.asked) == num_asked and [kind for kind, _ in session.told] == ["non_finite"] * 5
    assert session.finished == 0
