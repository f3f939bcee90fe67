"""How soon the services know: a death within a second, a hang within its allowance, NaN in its own step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from support.jobs import assert_proven, lineage_of, user_job, write_job
from support.services import Services, events_until, resized, services, wait_for_step

from phalanx.lineage.events import EventType, JobState
from phalanx.train.values import EventView

DEATH_S, FLOOR_S, FACTOR, SLACK_S = 1.0, 10.0, 3.0, 2.0
FAR = 1_000_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services(Path(tmp_path_factory.mktemp("up")) / "home", slots=2) as running:
        yield running


@pytest.mark.timeout(300)
def test_death_of_a_rank_is_an_event_within_a_second(shared: Services, corpus: str, tmp_path: Path) -> None:
    path = resized(write_job(tmp_path, corpus, steps=FAR), name="dies")
    noticed: dict[int, float] = {}

    def is_recovering(event: EventView) -> bool:
        if event.type is EventType.RECOVERING:
            noticed[event.attempt] = time.monotonic()
        return event.type is EventType.STOPPED

    with shared.client() as client:
        client.submit(path)
        watching = threading.Thread(target=events_until, args=(client, "dies", is_recovering, 110.0), daemon=True)
        watching.start()
        took_s = []
        for attempt in (1, 2):
            wait_for_step(client, "dies", 4 * attempt)
            assert client.job("dies").attempt == attempt
            killed_s = time.monotonic()
            os.kill(shared.ranks()[-1], signal.SIGKILL)
            events_until(
                client,
                "dies",
                lambda event, attempt=attempt: event.type is EventType.RECOVERING and event.attempt == attempt,
            )
            took_s.append(noticed.get(attempt, time.monotonic()) - killed_s)
        client.stop("dies")
        client.wait("dies", 60)
        watching.join(10)
    print(f"death to event: {took_s}")  # noqa: T201
    assert max(took_s) < DEATH_S, took_s


@pytest.mark.timeout(300)
def test_hang_is_found_within_its_allowance(shared: Services, corpus: str, tmp_path: Path) -> None:
    path = resized(
        user_job(tmp_path, corpus, "Oversleeps", once=True, at_call=30), ("steps = 6", "steps = 40"), name="hangs"
    )
    with shared.client() as client:
        client.submit(path)
        events = events_until(client, "hangs", lambda event: event.type is EventType.RECOVERING)
        assert client.wait("hangs", 60).state is JobState.SUCCEEDED
    (recovering,) = (event for event in events if event.type is EventType.RECOVERING)
    assert recovering.cause is not None and recovering.cause.kind == "hang", recovering
    assert "doze_off" in recovering.cause.detail or "doze_off" in recovering.cause.where, recovering.cause
    took_s = datetime.fromisoformat(recovering.time).timestamp() - (tmp_path / "happened").stat().st_mtime
    # Steps 1 to 27 are the first attempt's: its last checkpoint before the hang is of step 28.
    times_s = np.concatenate([steps.step_time_s[steps.step < 28] for _, steps in lineage_of(path).live_records()])
    allowed_s = max(FLOOR_S, FACTOR * float(np.quantile(times_s, 0.99)))
    print(f"hang to event: {took_s:.2f} s of {allowed_s:.2f} s")  # noqa: T201
    assert took_s < allowed_s + SLACK_S
    assert_proven(path, 40)


@pytest.mark.timeout(300)
def test_nan_is_an_incident_of_its_own_step(shared: Services, corpus: str, tmp_path: Path) -> None:
    path = resized(
        user_job(tmp_path, corpus, "Overflows", once=True, at_call=4), ("steps = 6", "steps = 40"), name="nan"
    )
    with shared.client() as client:
        client.submit(path)
        events = events_until(client, "nan", lambda event: event.type is EventType.INCIDENT)
        assert client.wait("nan", 60).state is JobState.SUCCEEDED
    incident = events[-1]
    assert incident.cause is not None and incident.cause.kind == "nan", incident
    assert incident.step == 4, incident
