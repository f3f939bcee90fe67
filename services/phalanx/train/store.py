"""The database of the train service: a copy of registered jobs and their event logs. Nothing is in it alone.

SQLite or PostgreSQL by URL; alembic brings it to the newest schema when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from phalanx.core.errors import OutsideError
from phalanx.database import SqlDatabase
from phalanx.lineage.documents import decode_document, encode_document
from phalanx.lineage.events import JobEvent
from phalanx.lineage.registry import JobName, RegisteredJob

METADATA = sa.MetaData()
JOBS: Final = sa.Table(
    "jobs",
    METADATA,
    sa.Column("project", sa.String(64), primary_key=True),
    sa.Column("uid", sa.String(64), primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)
EVENTS: Final = sa.Table(
    "events",
    METADATA,
    sa.Column("project", sa.String(64), primary_key=True),
    sa.Column("uid", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)
SOURCE: Final = sa.Table("source", METADATA, sa.Column("url", sa.Text, primary_key=True))
_MIGRATIONS = Path(__file__).parent / "migrations"


class JobStore:
    """The database at `url` (SQLAlchemy's form), a copy of what lies below `source` (a storage URL).

    A copy of another source is emptied. Raises PhalanxError for a URL that no database has, OutsideError where the
    database fails. Safe for several threads.
    """

    def __init__(self, url: str, source: str) -> None:
        self._database = SqlDatabase(url, _MIGRATIONS, "train_schema_version")
        self._adopt(source)

    def close(self) -> None:
        """Ends the connections."""
        self._database.close()

    def jobs(self) -> tuple[RegisteredJob, ...]:
        """All registered jobs that are in it, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(JOBS.c.body).order_by(JOBS.c.project, JOBS.c.uid)).scalars().all()
        return tuple(decode_document(RegisteredJob, "row of jobs", body.encode()) for body in rows)

    def add_job(self, job: RegisteredJob) -> None:
        """Enters a job; one that is there already stays as it is."""
        row = {"project": job.project, "uid": job.uid, "body": encode_document(job).decode()}
        self._insert(JOBS, row)

    def add_event(self, name: JobName, event: JobEvent) -> None:
        """Enters an event; one that is there already stays as it is."""
        row = {"project": name.project, "uid": name.uid, "number": event.number, "body": _body(event)}
        self._insert(EVENTS, row)

    def events(self, name: JobName, after: int = 0, limit: int | None = None) -> tuple[JobEvent, ...]:
        """The events of a job behind a number, in order."""
        query = sa.select(EVENTS.c.number, EVENTS.c.body).where(*_of(EVENTS, name), EVENTS.c.number > after)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(EVENTS.c.number).limit(limit)).all()
        return tuple(decode_document(JobEvent, f"event {row.number} of {name}", row.body.encode()) for row in rows)

    def forget(self, name: JobName) -> None:
        """Takes a job and its events out."""
        with self._database.writing() as connection:
            connection.execute(sa.delete(EVENTS).where(*_of(EVENTS, name)))
            connection.execute(sa.delete(JOBS).where(*_of(JOBS, name)))

    def dump(self) -> tuple[tuple[tuple[Any, ...], ...], ...]:
        """Every row of jobs and events, to compare two databases."""
        with self._database.reading() as connection:
            jobs = connection.execute(sa.select(JOBS).order_by(*JOBS.primary_key.columns)).all()
            events = connection.execute(sa.select(EVENTS).order_by(*EVENTS.primary_key.columns)).all()
        return tuple(map(tuple, jobs)), tuple(map(tuple, events))

    def _adopt(self, source: str) -> None:
        with self._database.writing() as connection:
            known = connection.execute(sa.select(SOURCE.c.url)).scalars().all()
            if known != [source]:
                for table in (EVENTS, JOBS, SOURCE):
                    connection.execute(sa.delete(table))
                connection.execute(sa.insert(SOURCE).values(url=source))

    def _insert(self, table: sa.Table, row: Mapping[str, object]) -> None:
        try:
            with self._database.writing() as connection:
                connection.execute(sa.insert(table).values(**row))
        except OutsideError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise


def _body(event: JobEvent) -> str:
    return encode_document(event).decode()


def _of(table: sa.Table, name: JobName) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return (table.c.project == name.project, table.c.uid == name.uid)
