"""Brings incidents to those who act: to train, and to people. What is done is noted in the database after it.

Train is told under the incident's id, so that telling twice does nothing; it is tried until train answers. People are
told on a thread of their own: a webhook that hangs holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.alerts import Alerts
from phalanx.monitor.incident import Incident, action_name, action_value
from phalanx.monitor.store import MonitorStore

LOG = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
REPORT_DEADLINE_S = 15.0


class Reports(Protocol):
    """What is used of train."""

    def ReportIncident(  # noqa: N802 - the contract's name
        self, request: train_pb.ReportIncidentRequest, /, *, timeout: float
    ) -> train_pb.ReportIncidentResponse: ...


class Worker:
    """A thread that does `work` once at the start and whenever it is woken, again after a pause where it says that
    something is left to do or an outside error came.
    """

    def __init__(self, name: str, work: Callable[[], bool]) -> None:
        self._work = work
        self._wake = threading.Event()
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins with what was left over."""
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def close(self, deadline_s: float = 5.0) -> None:
        """Ends after what is under way."""
        self.stop.set()
        self._wake.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        failures = 0
        while not self.stop.is_set():
            self._wake.wait()
            self._wake.clear()
            if self.stop.is_set():
                return
            try:
                is_done = self._work()
            except OutsideError as error:
                LOG.warning("%s: %s", self._thread.name, error)
                is_done = False
            except Exception:
                LOG.exception("%s failed", self._thread.name)
                is_done = False
            failures = 0 if is_done else failures + 1
            if not is_done:
                self.stop.wait(min(FIRST_PAUSE_S * 2 ** min(failures, 8), LONGEST_PAUSE_S))
                self._wake.set()


class Reporter:
    """train: None where there is none, then nothing is reported. on_outcome: is given the incident as it then is."""

    def __init__(
        self,
        store: MonitorStore,
        train: Reports | None,
        alerts: Alerts,
        on_outcome: Callable[[Incident], None] = lambda _: None,
    ) -> None:
        self._store, self._train, self._alerts, self._on_outcome = store, train, alerts, on_outcome
        self._workers = (Worker("reports", self._report), Worker("alerts", self._alert))

    def start(self) -> None:
        """Begins with what an earlier process left over."""
        for worker in self._workers:
            worker.start()

    def wake(self) -> None:
        """There are new incidents in the database."""
        for worker in self._workers:
            worker.wake()

    def close(self) -> None:
        """Ends; what is left is for the next process."""
        for worker in self._workers:
            worker.close()

    def _report(self) -> bool:
        if self._train is None:
            return True
        for incident in self._store.unreported():
            if self._workers[0].stop.is_set():
                return True
            done = replace(incident, outcome=self._outcome(incident, self._train), is_reported=True)
            self._store.set_outcome(done)
            self._on_outcome(done)
        return True

    def _outcome(self, incident: Incident, train: Reports) -> str:
        """What train does about it, in one line. Raises OutsideError where train does not answer."""
        request = train_pb.ReportIncidentRequest(
            request_id=incident.id,
            job=incident.job,
            attempt=incident.attempt,
            cause=incident.cause,
            first_step=incident.step,
            last_step=incident.last_step,
            action=action_value(incident.action),
        )
        try:
            answer = train.ReportIncident(request, timeout=REPORT_DEADLINE_S)
        except PhalanxError as error:
            return f"refused by train: {error}"
        return f"{action_name(answer.action)}: {answer.message}" if answer.message else action_name(answer.action)

    def _alert(self) -> bool:
        for incident in self._store.unalerted():
            if self._workers[1].stop.is_set() or not self._alerts.tell(incident, self._workers[1].stop):
                return True
            self._store.set_alerted(incident.id)
        return True
