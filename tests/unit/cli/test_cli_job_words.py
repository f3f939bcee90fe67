"""What `phalanx job` and `phalanx checkpoint` say of events, and under which names they refuse."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.names import parse_selector
from phalanx.cli.checkpoint.pin import _as_given
from phalanx.cli.job_display import event_line
from phalanx.cli.options import Option, named_as_given
from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage.events import Cause, EventType, JobState
from phalanx.train.values import EventView

CAUSE = Cause("user_error", message="data.train at file:///x: expected a split")


def failed(message: str, cause: Cause | None = CAUSE) -> str:
    return event_line(EventView(4, EventType.FAILED, JobState.FAILED, "now", message=message, cause=cause))


def test_event_whose_message_is_its_cause_says_it_once() -> None:
    assert failed(CAUSE.message) == f"[4] failed: {CAUSE.message}"
    assert failed(f"before a checkpoint was committed: {CAUSE.message}").count(CAUSE.message) == 1


def test_event_with_a_message_of_its_own_says_both() -> None:
    assert failed("given up after 3 attempts") == f"[4] failed: given up after 3 attempts: {CAUSE.message}"
    assert failed("") == f"[4] failed: {CAUSE.message}"
    assert failed("queued again", None) == "[4] failed: queued again"
    assert failed("", None) == "[4] failed"


def raised(error: PhalanxError, options: dict[str, Option]) -> PhalanxError:
    with pytest.raises(PhalanxError) as caught, named_as_given(options):
        raise error
    return caught.value


def test_refusal_of_a_field_names_the_option_and_what_was_written() -> None:
    error = PhalanxError("offset", value=-5, expected="a smaller number", remedy="correct it")
    told = raised(error, {"offset": Option("--tail", 5)})
    assert str(told) == "--tail is 5: expected a smaller number; correct it" and told.__cause__ is error


def test_refusal_of_another_field_and_several_at_once_stay_as_they_are() -> None:
    error = PhalanxError("rank", value=5, expected="another", remedy="correct it")
    assert raised(error, {"offset": Option("--tail", 5)}) is error
    several = Problems("offset", [PhalanxError("offset", expected="x", remedy="y"), error])
    assert raised(several, {"offset": Option("--tail", 5)}) is several


def test_selector_that_is_none_is_told_as_the_argument() -> None:
    with pytest.raises(PhalanxError, match=r"^CHECKPOINT is 'seven': expected `latest`, a step"), _as_given("seven", 0):
        parse_selector("seven")
