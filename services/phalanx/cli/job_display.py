"""A job under the services, followed on a terminal: its events as lines, its steps as a bar."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import PhalanxError
from phalanx.core.step_parts import Part, StepParts

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.core.expert_load import ExpertLoad
    from phalanx.train.values import EvaluationView, EventView, JobView

LOOK_EVERY_S = 0.5
_BAD = ("incident", "recovering", "failed")


def watch_job(client: Client, name: str, after_revision: int, *, as_json: bool) -> JobView:
    """Follows the job until it is over; the job then. With `as_json` every event is a line of JSON on stdout. Raises
    PhalanxError for a revision that the job does not have yet.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    job = client.job(name)  # where there is none, it is told before a bar is drawn
    if after_revision > job.revision:
        raise PhalanxError(
            "--after",
            value=after_revision,
            expected=f"at most {job.revision}, the newest",
            remedy="correct the revision",
        )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[said]}"), console=console, disable=as_json) as progress:
        task = progress.add_task(name.rpartition("/")[2], total=None, said="")

        def show(event: EventView) -> None:
            if as_json:
                sys.stdout.write(json.dumps(event_facts(event)) + "\n")
                sys.stdout.flush()
            else:
                style = "red" if str(event.type) in _BAD else None
                progress.console.print(event_line(event), style=style, markup=False, highlight=False)

        for job in follow_job(client, name, after_revision, show):
            loss = "" if job.loss is None else f"loss {job.loss:.4f} "
            load = "" if job.expert_load is None else f"busiest expert {job.expert_load.worst:.2f} x mean "
            progress.update(task, completed=job.step, total=job.num_steps, said=f"{loss}{load}{job.state}")
    return job


def follow_job(
    client: Client, name: str, after_revision: int, on_event: Callable[[EventView], None]
) -> Iterator[JobView]:
    """Yields the job every half second, and a last time when it is over and all its events were given to `on_event`.
    A service that is away for less than a minute is waited for.
    """
    from phalanx.client import AWAY_S
    from phalanx.rpc import Unavailable

    events: queue.SimpleQueue[EventView | Exception] = queue.SimpleQueue()
    job = client.job(name)

    def listen() -> None:
        try:
            for event in client.watch(name, after_revision):
                events.put(event)
        except Exception as error:  # noqa: BLE001 - raised again by whoever follows, who would wait for ever else
            events.put(error)

    threading.Thread(target=listen, name="watch", daemon=True).start()
    seen, heard_s = after_revision, time.monotonic()
    while True:
        try:
            item = events.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            item = None
        if isinstance(item, Exception):
            raise item
        if item is not None:
            seen = item.revision
            on_event(item)
            if not events.empty():
                continue
        try:
            job = client.job(name)
        except Unavailable:  # train is being started again, say
            if time.monotonic() - heard_s > AWAY_S:
                raise
            continue
        heard_s = time.monotonic()
        yield job
        if job.is_over and seen >= job.revision:
            return


def shares_of(parts: StepParts) -> str:
    """The parts of a step's wall time in one line, largest first, those below half a percent left out."""
    seconds = {part.value.removesuffix("_s").replace("_", " "): getattr(parts, part) for part in Part}
    shares = sorted(((value / parts.wall_s, name) for name, value in seconds.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)


def load_words(load: ExpertLoad) -> str:
    """How evenly experts were loaded, in one line."""
    said = f"busiest {load.worst:.2f} x mean of its layer, {load.mean:.2f} in the mean of layers, {load.idle:.0%} idle"
    return said if load.balance_loss is None else f"{said}, balance loss {load.balance_loss:.4g}"


def evaluation_words(evaluation: EvaluationView) -> str:
    """An evaluation in one line."""
    figures = {"loss": evaluation.loss, **dict(sorted(evaluation.metrics.items()))}
    said = [f"{name} {'not finite' if value is None else f'{value:.4f}'}" for name, value in figures.items()]
    return f"step {evaluation.step}: {', '.join(said)}"


def event_facts(event: EventView) -> dict[str, Any]:
    """An event as JSON values."""
    return {
        **asdict(event),
        "type": str(event.type),
        "state": str(event.state),
        "cause": None if event.cause is None else asdict(event.cause),
        "placement": {each.node_id: list(each.ranks) for each in event.placement},
    }


def event_line(event: EventView) -> str:
    """An event in one line."""
    words = [f"[{event.revision}]", str(event.type).replace("_", " ")]
    if event.attempt:
        words.append(f"attempt {event.attempt}")
    if event.step:
        words.append(f"step {event.step}")
    cause = event.cause.message if event.cause else ""
    said = ": ".join(filter(None, (event.message, "" if event.message.endswith(cause) else cause)))
    return " ".join(words) + (f": {said}" if said else "") + (f" (by {event.actor})" if event.actor else "")
