"""The main job of the demo under its services: submitted, followed, struck, stopped, resumed in another layout."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from rich.console import Console

from phalanx.cli.demo.cluster import Cluster
from phalanx.cli.demo.trouble import STOP_AFTER_STEP, Trouble
from phalanx.cli.job_display import event_line
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.events import EventType, JobState
from phalanx.rpc import Unavailable
from phalanx.train.values import EventView, JobView

LOOK_EVERY_S = 0.1
RUN_DEADLINE_S = 280.0
_BAD = (EventType.INCIDENT, EventType.RECOVERING, EventType.FAILED)


class MainJob:
    """One telling of the main job. name: its full name, once submitted."""

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self._client, self._console = cluster.client, console
        self.trouble = Trouble(cluster, lambda text: self._say(text, "red"))
        self.name = ""
        self._events: queue.SimpleQueue[EventView] = queue.SimpleQueue()
        self._shown = (0, 0)
        self._is_over = threading.Event()
        self.num_checkpoints = 0

    def submit(self, path: Path) -> None:
        """Submits the job file, and follows its events from now on."""
        self.name = self._client.submit(path).job.name
        threading.Thread(target=self._listen, name="demo-watch", daemon=True).start()

    def run_until(self, wanted: JobState, *, stops: bool = False) -> JobView:
        """Follows the job until it is in that state. stops: asks for a stop on the way. Raises OutsideError when it
        ends otherwise, or not in time.
        """
        end_s = time.monotonic() + RUN_DEADLINE_S
        asked = False
        while time.monotonic() < end_s:
            job = self._look()
            if job is not None:
                if stops and not asked and job.step >= STOP_AFTER_STEP and not self.trouble.num_left:
                    asked = self._stop()
                if job.state is wanted:
                    self._drain(job.revision)
                    return job
                if job.state is JobState.FAILED or (job.is_over and asked is stops):
                    raise OutsideError(f"{self.name} is {job.state}, expected {wanted}: {job.cause or job.message}")
            time.sleep(LOOK_EVERY_S)
        raise OutsideError(f"{self.name} is not {wanted} after {RUN_DEADLINE_S:g} s")

    def resume(self, overrides: tuple[str, ...]) -> None:
        """Goes on with the job."""
        self.trouble.resume()
        self._client.resume(self.name, overrides)

    def close(self) -> None:
        """Nothing more is watched; call before the client is closed."""
        self._is_over.set()

    def _stop(self) -> bool:
        try:
            self._client.stop(self.name, request_id="demo-stop")
        except Unavailable:
            return False
        self._say("phalanx job stop", "yellow")
        return True

    def _look(self) -> JobView | None:
        """The job now, None while train is away; events that came meanwhile are shown first."""
        self._drain()
        try:
            job = self._client.job(self.name)
        except Unavailable:
            return None
        if job.loss is not None and (job.attempt, job.step) > self._shown:
            self._shown = (job.attempt, job.step)
            self._say(f"step {job.step}/{job.num_steps}  loss {job.loss:.4f}")
        self.trouble.observe(job)
        return job

    def _drain(self, until_revision: int = 0) -> None:
        """Shows the events that came. until_revision: waits for that one."""
        end_s = time.monotonic() + 10.0
        revision = 0
        while not self._events.empty() or revision < until_revision:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() > end_s:
                    return
                continue
            revision = event.revision
            self._take(event)

    def _take(self, event: EventView) -> None:
        self.num_checkpoints += event.type is EventType.COMMITTED
        style = "red" if event.type in _BAD else "green" if event.type is EventType.COMMITTED else None
        self._say(event_line(event), style)

    def _listen(self) -> None:
        try:
            for event in self._client.watch(self.name):
                self._events.put(event)
        except (PhalanxError, OutsideError, ValueError) as error:
            if not self._is_over.is_set():
                self._say(f"no longer watching: {error}", "red")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(f"demo: {text}", style=style, markup=False, highlight=False, soft_wrap=True)
