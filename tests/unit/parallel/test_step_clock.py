"""The parts of a step sum up to its wall time, and what takes long lands in its own part."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.core.step_parts import Part, StepParts
from phalanx.gang.watch import waits_in_collective
from phalanx.parallel.clock import StepClock
from phalanx.trainer.watchdog import main_thread_stack

CPU = torch.device("cpu")


class Time:
    """Seconds that pass only when a test lets them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def hands() -> Time:
    return Time()


@pytest.fixture
def clock(hands: Time) -> StepClock:
    clock = StepClock(CPU, hands)
    clock.start()
    return clock


def test_parts_of_steps_sum_up_to_the_wall_time_of_all() -> None:
    clock = StepClock(CPU)
    before_s = time.perf_counter()
    clock.start()
    after_s = time.perf_counter()
    steps = []
    for _ in range(20):
        for part in Part:
            with clock.part(part):
                sum(range(1000))
        last_s = time.perf_counter()
        steps.append(clock.end_step())
    took_s = sum(step.wall_s for step in steps)
    assert last_s - after_s <= took_s <= time.perf_counter() - before_s
    assert all(getattr(step, part) > 0 for step in steps for part in Part)


@pytest.mark.parametrize("part", Part)
def test_long_part_is_counted_as_itself_alone(clock: StepClock, hands: Time, part: Part) -> None:
    with clock.part(part):
        hands.passes(2.0)
    assert clock.end_step() == StepParts.of({part: 2.0})


def test_part_inside_another_is_taken_out_of_it(clock: StepClock, hands: Time) -> None:
    hands.passes(0.5)
    with clock.part(Part.BACKWARD):
        hands.passes(1.0)
        with clock.part(Part.COMMUNICATION):
            hands.passes(4.0)
        hands.passes(2.0)
    assert clock.end_step() == StepParts.of({Part.BACKWARD: 3.0, Part.COMMUNICATION: 4.0, Part.REST: 0.5})


def test_part_that_raises_ends_as_well(clock: StepClock, hands: Time) -> None:
    with pytest.raises(KeyError), clock.part(Part.OPTIMIZER):
        hands.passes(1.0)
        raise KeyError
    hands.passes(2.0)
    assert clock.end_step() == StepParts.of({Part.OPTIMIZER: 1.0, Part.REST: 2.0})


def test_next_step_begins_where_the_last_one_ended(clock: StepClock, hands: Time) -> None:
    with clock.part(Part.FORWARD):
        hands.passes(1.0)
    assert clock.end_step().wall_s == 1.0
    hands.passes(3.0)
    with clock.part(Part.EVALUATION):
        hands.passes(0.25)
    assert clock.end_step() == StepParts.of({Part.EVALUATION: 0.25, Part.REST: 3.0})


def test_clock_that_was_not_started_counts_nothing(hands: Time) -> None:
    clock = StepClock(CPU, hands)
    with clock.part(Part.FORWARD):
        hands.passes(1.0)
    clock.start()
    assert clock.end_step().wall_s == 0.0


def test_other_threads_change_nothing(clock: StepClock, hands: Time) -> None:
    def work() -> None:
        with clock.part(Part.COMMUNICATION):
            hands.passes(1.0)

    thread = threading.Thread(target=work)
    with clock.part(Part.DATA):
        thread.start()
        thread.join(10)
    assert clock.end_step() == StepParts.of({Part.DATA: 1.0})


def test_timed_function_gives_what_it_gave_inside_its_part(clock: StepClock, hands: Time) -> None:
    def doubled(value: int, *, plus: int) -> int:
        hands.passes(1.0)
        return 2 * value + plus

    assert clock.timed(Part.FORWARD, doubled)(3, plus=1) == 7
    assert clock.end_step() == StepParts.of({Part.FORWARD: 1.0})


def test_collective_of_a_backward_pass_is_taken_out_of_it(clock: StepClock, hands: Time) -> None:
    class Gathers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            with clock.part(Part.COMMUNICATION):
                hands.passes(1.0)
            hands.passes(0.5)
            return gradients[0] * 2

    loss = Gathers.apply(torch.ones(1, requires_grad=True))
    with clock.part(Part.BACKWARD):
        loss.backward()
    assert clock.end_step() == StepParts.of({Part.BACKWARD: 0.5, Part.COMMUNICATION: 1.0})


@pytest.fixture
def slow_waits(monkeypatch: pytest.MonkeyPatch, hands: Time) -> None:
    """Everything that is waited for takes a second."""
    monkeypatch.setattr(dist.Work, "wait", lambda work, *args: hands.passes(1.0))


@pytest.mark.usefixtures("slow_waits")
@pytest.mark.parametrize(
    ("around", "counted"),
    [
        (Part.REST, Part.COMMUNICATION),
        (Part.FORWARD, Part.COMMUNICATION),
        (Part.BACKWARD, Part.COMMUNICATION),
        (Part.OPTIMIZER, Part.COMMUNICATION),
        (Part.DATA, Part.DATA),
        (Part.CHECKPOINT, Part.CHECKPOINT),
        (Part.EVALUATION, Part.EVALUATION),
    ],
)
def test_wait_in_a_collective_is_communication_but_for_parts_that_have_their_own(
    clock: StepClock, around: Part, counted: Part
) -> None:
    with clock.counting_waits(), clock.part(around):
        dist.Work.wait(None)  # type: ignore[arg-type]
    assert clock.end_step() == StepParts.of({counted: 1.0})


@pytest.mark.usefixtures("slow_waits")
def test_of_communication_beside_computation_only_the_wait_that_is_left_counts(clock: StepClock, hands: Time) -> None:
    with clock.counting_waits(), clock.part(Part.BACKWARD):
        hands.passes(3.0)  # computing, while what began before is on its way
        dist.Work.wait(None)  # type: ignore[arg-type]
    assert clock.end_step() == StepParts.of({Part.BACKWARD: 3.0, Part.COMMUNICATION: 1.0})


@pytest.mark.usefixtures("slow_waits")
def test_wait_of_another_thread_is_not_communication_and_waits_are_as_before_afterwards(clock: StepClock) -> None:
    before = dist.Work.wait
    with clock.counting_waits():
        thread = threading.Thread(target=lambda: dist.Work.wait(None))  # type: ignore[arg-type]
        thread.start()
        thread.join(10)
    assert dist.Work.wait is before
    assert clock.end_step() == StepParts.of({Part.REST: 1.0})


@pytest.mark.parametrize("around", [Part.FORWARD, Part.DATA], ids=["measured", "of a part with its own"])
def test_rank_in_a_wait_is_seen_to_wait_for_its_peers(
    clock: StepClock, around: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a hang would be blamed on whoever waits for the rank that hangs."""
    stacks = []

    def native_wait(_: object) -> None:  # torch's own is no frame of Python
        stacks.append(main_thread_stack()[2:])

    monkeypatch.setattr(dist.Work, "wait", native_wait)
    with clock.counting_waits(), clock.part(around):
        dist.Work.wait(None)  # type: ignore[arg-type]
    ((innermost, *others),) = stacks
    assert waits_in_collective((innermost, *others)) and not waits_in_collective(others)


def test_parts_that_are_not_given_are_zero() -> None:
    parts = StepParts.of({Part.FORWARD: 1.0, Part.REST: 0.5})
    assert (parts.forward_s, parts.backward_s, parts.wall_s) == (1.0, 0.0, 1.5)
