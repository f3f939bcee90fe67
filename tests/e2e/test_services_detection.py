"""How soon the services know: a death within a second, a hang within its allowance, NaN in its own step.

The end of an attempt tells the death of its rank, unless peers take their time to end: then an event of its own does.
"""

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
from support.jobs import assert_proven, lineage_of, user_job, wait_until, write_job
from support.services import Services, events_until, resized, services, wait_for_step

from phalanx import Client
from phalanx.lineage.events import EventType, JobState
from phalanx.train.values import EventView

DEATH_S, FLOOR_S, FACTOR, SLACK_S = 1.0, 10.0, 3.0, 2.0
PEERS_S = 3.0  # until the peers of a dead rank are killed
FAR = 1_000_000


def tells_a_death(event: EventView) -> bool:
    """Whether it is the first or the second event that a death leads to."""
    kinds = (EventType.INCIDENT, EventType.RECOVERING)
    return event.type in kinds and event.cause is not None and event.cause.kind == "process_death"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services(Path(tmp_path_factory.mktemp("up")) / "home", slots=2) as running:
        yield running


@pytest.mark.timeout(300)
def test_death_of_a_rank_is_an_event_within_a_second(shared: Services, corpus: str, tmp_path: Path) -> None:
    path = resized(write_job(tmp_path, corpus, steps=FAR), name="dies")
    with shared.client() as client:
        client.submit(path)
        took_s = [told_s(shared, client, "dies", attempt, 4 * attempt)[0] for attempt in (1, 2)]
        client.stop("dies")
        client.wait("dies", 60)
    print(f"death to event: {took_s}")  # noqa: T201
    assert max(took_s) < DEATH_S, took_s


@pytest.mark.timeout(300)
def test_death_for_which_a_peer_waits_in_its_save_is_an_event_within_a_second(
    shared: Services, corpus: str, tmp_path: Path
) -> None:
    """Rank 0 waits for the part of rank 1, outside any collective, and sees nothing of its death: it is killed."""
    path = resized(user_job(tmp_path, corpus, "SavesSlowly", at_call=4), ("steps = 6", "steps = 40"), name="waits")
    with shared.client() as client:
        client.submit(path)
        events_until(client, "waits", lambda event: event.type is EventType.COMMITTED and event.step == 2)
        wait_until(lambda: section_of(shared, "waits", 0) == ("commit", 6), 60, "rank 0 waits for its save of step 4")
        told, ended = told_s(shared, client, "waits", 1, 2)
        client.stop("waits")
        client.wait("waits", 60)
    print(f"death to event: {told}, to the end of the attempt: {ended}")  # noqa: T201
    assert told < DEATH_S and PEERS_S <= ended < PEERS_S + DEATH_S


def told_s(shared: Services, client: Client, job: str, attempt: int, step: int) -> tuple[float, float]:
    """Kills rank 1 of the job's attempt once it is at `step`: how long until a watcher had an event of it, and until it
    knew that the attempt is over.
    """
    noticed: dict[EventType, float] = {}

    def is_recovering(event: EventView) -> bool:
        if event.attempt == attempt and tells_a_death(event):
            noticed.setdefault(event.type, time.monotonic())
        return event.type is EventType.RECOVERING and event.attempt == attempt

    watching = threading.Thread(target=events_until, args=(client, job, is_recovering, 110.0), daemon=True)
    watching.start()
    wait_for_step(client, job, step)
    assert client.job(job).attempt == attempt
    killed_s = time.monotonic()
    os.kill(shared.ranks()[-1], signal.SIGKILL)
    watching.join(60)
    ended_s = noticed[EventType.RECOVERING] - killed_s
    return min(noticed.values()) - killed_s, ended_s


def section_of(shared: Services, job: str, rank: int) -> tuple[str, int]:
    """Section and step of a rank, as the page has them."""
    ranks = shared.page("run", job=f"projects/default/jobs/{job}")["ranks"]
    return next(((each["phase"], each["step"]) for each in ranks if each["rank"] == rank), ("", 0))


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
    times_s = np.concatenate([steps.step_time_s[steps.step < 28] for _, steps in lineage_of(path).records.live()])
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
