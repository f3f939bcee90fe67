"""What the monitor keeps over its own end: measurements, incidents, and how far it has read.

One transaction holds what was read together with how far that was, so that a kill between two of them loses nothing
and repeats nothing. An incident is there before anybody is told of it. The database may be lost: curves, events and
incidents come again from storage and from train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.database import SqlDatabase
from phalanx.monitor.attempts import AttemptFacts
from phalanx.monitor.curve import Rows, rows_of
from phalanx.monitor.incident import Incident
from phalanx.monitor.rules import Action
from phalanx.monitor.rules.gpu import FaultCounts
from phalanx.monitor.run import Summary
from phalanx.monitor.tables import EVENTS, FIGURES, GPU_FAULTS, INCIDENTS, PIECES, RUNS

_CURSOR, _BOOT = "cursor", "boot"
_BOOTS_SINCE_S = 1_767_225_600  # 2026-01-01
_MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Position:
    """How far the records were read: the log of train, and the number of its last record."""

    log_id: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it was saved, without its steps. evaluations: loss and the job's own metrics, by step."""

    summary: Summary
    num_missed: int
    attempts: Mapping[int, AttemptFacts]
    evaluations: Mapping[int, tuple[float, Mapping[str, float]]]
    events: tuple[train_pb.JobEvent, ...] = ()
    incidents: tuple[Incident, ...] = ()
    heat: record_pb.ExpertHeat | None = None


@dataclass(frozen=True, slots=True)
class RunChange:
    """What of a run is to be saved. run: with the events that are new, and without incidents. pieces: replace those
    from `first_piece` on; None where no step changed.
    """

    run: StoredRun
    first_piece: int | None = None
    pieces: Mapping[int, bytes] = field(default_factory=dict)


class MonitorStore:
    """One database by its SQLAlchemy URL. Every method raises OutsideError when the database does not answer."""

    def __init__(self, url: str) -> None:
        """Connects and brings the tables up to date. Raises PhalanxError for a URL that is none."""
        self._database = SqlDatabase(url, _MIGRATIONS, "monitor_schema_version")

    def close(self) -> None:
        """Lets go of the connections."""
        self._database.close()

    # Runs.

    def next_boot(self) -> int:
        """A number greater than that of every earlier start of this monitor; with a new database it begins at the
        minutes since 2026, so that it is greater than those of a database that was lost.
        """
        with self._database.writing() as connection:
            row = connection.execute(sa.select(FIGURES.c.number).where(FIGURES.c.name == _BOOT)).first()
            boot = row.number + 1 if row else max(1, int(time.time() - _BOOTS_SINCE_S) // 60)
            _replace(connection, FIGURES, {"name": _BOOT}, {"text": "", "number": boot})
        return boot

    def position(self) -> Position:
        """How far the records were read."""
        with self._database.reading() as connection:
            row = connection.execute(sa.select(FIGURES).where(FIGURES.c.name == _CURSOR)).first()
        return Position(row.text, row.number) if row else Position()

    def runs(self) -> list[StoredRun]:
        """All runs, those heard last first, without their steps."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(RUNS).order_by(RUNS.c.heard.desc())).all()
            events: dict[str, list[train_pb.JobEvent]] = {}
            for job, data in connection.execute(sa.select(EVENTS.c.job, EVENTS.c.data).order_by(EVENTS.c.revision)):
                events.setdefault(job, []).append(train_pb.JobEvent.FromString(data))
            incidents: dict[str, list[Incident]] = {}
            for row in connection.execute(sa.select(INCIDENTS).order_by(INCIDENTS.c.number)):
                incidents.setdefault(row.job, []).append(_incident(row))
        return [_stored(row, events.get(row.job, ()), incidents.get(row.job, ())) for row in rows]

    def curve(self, job: str) -> Rows:
        """The steps of a run."""
        chosen = sa.select(PIECES.c.data).where(PIECES.c.job == job).order_by(PIECES.c.number)
        with self._database.reading() as connection:
            return rows_of(connection.execute(chosen).scalars())

    def save(
        self, position: Position, changes: Sequence[RunChange], incidents: Sequence[tuple[Incident, bool]] = ()
    ) -> int:
        """What was read, what was found in it, and how far that was: all of it or nothing. incidents: each with whether
        nobody needs to be told of it; those that are there already stay as they are. The number of new ones.
        """
        with self._database.writing() as connection:
            heard = time.time_ns()
            for change in changes:
                _save_run(connection, change, heard)
            num_new = sum(_add_incident(connection, *each) for each in incidents)
            _replace(connection, FIGURES, {"name": _CURSOR}, {"text": position.log_id, "number": position.number})
        return num_new

    def prune(self, max_runs: int) -> list[str]:
        """Removes the measurements of all but the `max_runs` runs heard last; their names. Incidents stay."""
        with self._database.writing() as connection:
            old = list(
                connection.execute(sa.select(RUNS.c.job).order_by(RUNS.c.heard.desc()).offset(max_runs)).scalars()
            )
            for job in old:
                for table in (PIECES, EVENTS, RUNS):
                    connection.execute(sa.delete(table).where(table.c.job == job))
        return old

    # Incidents.

    def set_outcome(self, incident: Incident) -> None:
        """Keeps what came of it."""
        values = {"action": incident.action.value, "outcome": incident.outcome, "is_reported": incident.is_reported}
        with self._database.writing() as connection:
            connection.execute(sa.update(INCIDENTS).where(INCIDENTS.c.id == incident.id).values(**values))

    def set_alerted(self, incident_id: str) -> None:
        """People were told."""
        with self._database.writing() as connection:
            connection.execute(sa.update(INCIDENTS).where(INCIDENTS.c.id == incident_id).values(is_alerted=True))

    def incidents(self, job: str = "") -> list[Incident]:
        """All, or those of a job; oldest first."""
        chosen = sa.select(INCIDENTS).order_by(INCIDENTS.c.number)
        return self._incidents(chosen.where(INCIDENTS.c.job == job) if job else chosen)

    def unreported(self) -> list[Incident]:
        """Those that train has not taken."""
        return self._incidents(sa.select(INCIDENTS).where(~INCIDENTS.c.is_reported).order_by(INCIDENTS.c.number))

    def unalerted(self) -> list[Incident]:
        """Those of which nobody was told."""
        return self._incidents(sa.select(INCIDENTS).where(~INCIDENTS.c.is_alerted).order_by(INCIDENTS.c.number))

    # GPUs.

    def fault_counts(self) -> dict[str, FaultCounts]:
        """What was last seen of each GPU's faults."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(GPU_FAULTS)).all()
        return {row.gpu: FaultCounts(row.xid, row.ecc_uncorrectable) for row in rows}

    def set_fault_counts(self, gpu: str, counts: FaultCounts) -> None:
        """Keeps them."""
        with self._database.writing() as connection:
            _replace(connection, GPU_FAULTS, {"gpu": gpu}, asdict(counts))

    def _incidents(self, chosen: sa.Select[Any]) -> list[Incident]:
        with self._database.reading() as connection:
            return [_incident(row) for row in connection.execute(chosen)]


def _replace(connection: sa.Connection, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """An update, or an insert where there is no row; this process alone writes."""
    where = [table.c[name] == value for name, value in key.items()]
    if connection.execute(sa.update(table).where(*where).values(**values)).rowcount == 0:
        connection.execute(sa.insert(table).values(**key, **values))


def _save_run(connection: sa.Connection, change: RunChange, heard: int) -> None:
    run, job = change.run, change.run.summary.job
    values = {name: getattr(run.summary, name) for name in _SUMMARY}
    values |= {
        "num_missed": run.num_missed,
        "heard": heard,
        "attempts": json.dumps([asdict(facts) for facts in run.attempts.values()]),
        "evaluations": json.dumps([_evaluation_row(step, *found) for step, found in sorted(run.evaluations.items())]),
        "expert_heat": None if run.heat is None else run.heat.SerializeToString(deterministic=True),
    }
    _replace(connection, RUNS, {"job": job}, values)
    _insert_events(connection, job, run.events)
    if change.first_piece is not None:
        connection.execute(sa.delete(PIECES).where(PIECES.c.job == job, PIECES.c.number >= change.first_piece))
        rows = [{"job": job, "number": number, "data": data} for number, data in change.pieces.items()]
        if rows:
            connection.execute(sa.insert(PIECES), rows)


def _add_incident(connection: sa.Connection, incident: Incident, is_alerted: bool) -> bool:
    if connection.execute(sa.select(INCIDENTS.c.id).where(INCIDENTS.c.id == incident.id)).first() is not None:
        return False
    last = connection.execute(sa.select(sa.func.max(INCIDENTS.c.number))).scalar()
    values = {
        "id": incident.id,
        "number": (last or 0) + 1,
        "job": incident.job,
        "attempt": incident.attempt,
        "step": incident.step,
        "last_step": incident.last_step,
        "cause": incident.cause.SerializeToString(deterministic=True),
        "action": incident.action.value,
        "outcome": incident.outcome,
        "time_ns": incident.time_ns,
        "is_reported": incident.is_reported,
        "is_alerted": is_alerted,
    }
    connection.execute(sa.insert(INCIDENTS).values(**values))
    return True


def _insert_events(connection: sa.Connection, job: str, events: Iterable[train_pb.JobEvent]) -> None:
    for event in events:
        key = {"job": job, "revision": event.revision}
        _replace(connection, EVENTS, key, {"data": event.SerializeToString(deterministic=True)})


_SUMMARY = ("state", "step", "num_steps", "loss", "tokens_per_second", "step_time_s", "attempt")


def _or_none(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _stored(row: sa.Row[Any], events: Iterable[train_pb.JobEvent], incidents: Iterable[Incident]) -> StoredRun:
    summary = Summary(row.job, **{name: getattr(row, name) for name in _SUMMARY})
    if summary.step and summary.loss is None:  # SQL has no NaN
        summary = replace(summary, loss=float("nan"))
    attempts = [_attempt(each) for each in json.loads(row.attempts)]
    evaluations = dict(_evaluation(*fields) for fields in json.loads(row.evaluations))
    heat = None if row.expert_heat is None else record_pb.ExpertHeat.FromString(row.expert_heat)
    by_number = {each.number: each for each in attempts}
    return StoredRun(summary, row.num_missed, by_number, evaluations, tuple(events), tuple(incidents), heat)


def _evaluation_row(step: int, loss: float, metrics: Mapping[str, float]) -> list[Any]:
    """As JSON has it: null for what is not finite, and no metrics where there are none."""
    row = [step, _or_none(loss), {name: _or_none(value) for name, value in metrics.items()}]
    return row if metrics else row[:2]


def _evaluation(
    step: int, loss: float | None, metrics: Mapping[str, float | None] | None = None
) -> tuple[int, tuple[float, Mapping[str, float]]]:
    return step, (_or_nan(loss), {name: _or_nan(value) for name, value in (metrics or {}).items()})


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _attempt(fields: Mapping[str, Any]) -> AttemptFacts:
    columns: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return AttemptFacts(**{**fields, **columns})


def _incident(row: sa.Row[Any]) -> Incident:
    return Incident(
        row.id,
        row.job,
        row.attempt,
        row.step,
        row.last_step,
        record_pb.Cause.FromString(row.cause),
        Action(row.action),
        row.outcome,
        row.time_ns,
        row.is_reported,
    )
