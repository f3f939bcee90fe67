"""The service's database: saves that were begun or given up, answers to operators' requests, and a catalog of what each
checkpoint holds.

A cache of decisions. Lost, it is made anew from storage: the catalog by looking, and a save that was begun is protected
without it too (`collection.leftover`). What is lost with it: that a save was given up (its objects stay until the
attempt commits a later step or ends), and the answers by which repeated requests are recognised. Where the store has no
create-only put it is more than that: what it decided first is the commit that counts (`decide`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from phalanx.database import SqlDatabase
from phalanx.lineage import CheckpointRef
from phalanx.lineage.registry import JobName

BEGUN: Final = "begun"
ABORTED: Final = "aborted"
LONGEST_ID = 200
_MIGRATIONS = Path(__file__).parent / "migrations"

_METADATA = sql.MetaData()


def _key_columns() -> tuple[sql.Column[Any], ...]:
    return (
        sql.Column("project", sql.String(63), primary_key=True),
        sql.Column("uid", sql.String(63), primary_key=True),
        sql.Column("attempt", sql.BigInteger, primary_key=True, autoincrement=False),
        sql.Column("step", sql.BigInteger, primary_key=True, autoincrement=False),
    )


SAVES = sql.Table("saves", _METADATA, *_key_columns(), sql.Column("state", sql.String(16), nullable=False))
CATALOG = sql.Table(
    "catalog",
    _METADATA,
    *_key_columns(),
    sql.Column("num_bytes", sql.BigInteger, nullable=False),
    sql.Column("world_size", sql.BigInteger, nullable=False),
    sql.Column("created_us", sql.BigInteger, nullable=False),
)
REQUESTS = sql.Table(
    "requests",
    _METADATA,
    sql.Column("request_id", sql.String(LONGEST_ID), primary_key=True),
    sql.Column("asked", sql.Text, nullable=False),
    sql.Column("answer", sql.Text),
)
DECISIONS = sql.Table("decisions", _METADATA, *_key_columns(), sql.Column("digest", sql.String(64), nullable=False))
SOURCE = sql.Table("source", _METADATA, sql.Column("url", sql.Text, primary_key=True))


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalog knows of a checkpoint. num_bytes: of its tensor data. created: when this service committed it or
    first saw it; for people only.
    """

    num_bytes: int
    world_size: int
    created: datetime


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was seen before: what was asked, and the answer where it was given."""

    asked: Mapping[str, Any]
    answer: Mapping[str, Any] | None


class Database:
    """Everything durable that the service knows beside storage. url: an SQLAlchemy URL, with its password. storage: URL
    of the cluster's root; what was known of another one is forgotten. Each method is one transaction, durable when it
    returns; safe for many threads. Raises OutsideError where the database fails.
    """

    def __init__(self, url: str, storage: str = "") -> None:
        self._database = SqlDatabase(url, _MIGRATIONS, "checkpoint_schema_version", is_durable=True)
        with self._database.writing() as connection:
            _adopt(connection, storage)

    def close(self) -> None:
        """Ends its connections."""
        self._database.close()

    def set_save(self, job: JobName, ref: CheckpointRef, state: Literal["begun", "aborted"]) -> None:
        """The save is begun, or given up."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(SAVES).where(_is(SAVES, job, ref)))
            connection.execute(sql.insert(SAVES).values(**_values(job, ref), state=state))

    def saves(self, job: JobName) -> dict[CheckpointRef, str]:
        """The saves of a job that were begun or given up and not committed, with their state."""
        query = sql.select(SAVES.c.attempt, SAVES.c.step, SAVES.c.state).where(_of(SAVES, job))
        with self._database.reading() as connection:
            return {CheckpointRef(row.attempt, row.step): row.state for row in connection.execute(query)}

    def forget_saves(self, job: JobName, refs: Iterable[CheckpointRef]) -> None:
        """Nothing is to be remembered of these: they are committed, or of an attempt that is over."""
        with self._database.writing() as connection:
            for ref in refs:
                connection.execute(sql.delete(SAVES).where(_is(SAVES, job, ref)))

    def decide(self, job: JobName, ref: CheckpointRef, digest: str) -> str:
        """The digest of the one manifest that may be created for this checkpoint: the first that was asked for."""
        with self._database.writing() as connection:
            query = sql.select(DECISIONS.c.digest).where(_is(DECISIONS, job, ref))
            decided = connection.execute(query).scalar()
            if decided is None:
                connection.execute(sql.insert(DECISIONS).values(**_values(job, ref), digest=digest))
        return digest if decided is None else str(decided)

    def note(self, job: JobName, ref: CheckpointRef, num_bytes: int, world_size: int, now: datetime) -> Entry:
        """The checkpoint exists: adds it to the catalog, if it is not there, and returns its entry."""
        values = {"num_bytes": num_bytes, "world_size": world_size, "created_us": int(now.timestamp() * 1_000_000)}
        with self._database.writing() as connection:
            known = connection.execute(sql.select(CATALOG).where(_is(CATALOG, job, ref))).first()
            if known is None:
                connection.execute(sql.insert(CATALOG).values(**_values(job, ref), **values))
            connection.execute(sql.delete(SAVES).where(_is(SAVES, job, ref)))
        return _entry(known) if known is not None else Entry(num_bytes, world_size, now)

    def catalog(self, job: JobName) -> dict[CheckpointRef, Entry]:
        """What is known of a job's checkpoints."""
        with self._database.reading() as connection:
            rows = connection.execute(sql.select(CATALOG).where(_of(CATALOG, job)))
            return {CheckpointRef(row.attempt, row.step): _entry(row) for row in rows}

    def drop(self, job: JobName, refs: Iterable[CheckpointRef]) -> None:
        """These checkpoints are gone."""
        with self._database.writing() as connection:
            for ref in refs:
                for table in (CATALOG, DECISIONS):
                    connection.execute(sql.delete(table).where(_is(table, job, ref)))

    def asked(self, request_id: str) -> Asked | None:
        """What is known of a request that was seen before."""
        with self._database.reading() as connection:
            known = connection.execute(sql.select(REQUESTS).where(REQUESTS.c.request_id == request_id)).first()
        if known is None:
            return None
        return Asked(json.loads(known.asked), json.loads(known.answer) if known.answer else None)

    def ask(self, request_id: str, asked: Mapping[str, Any]) -> None:
        """Remembers a request before it is acted upon; the first to come counts."""
        with self._database.writing() as connection:
            query = sql.select(REQUESTS.c.request_id).where(REQUESTS.c.request_id == request_id)
            if connection.execute(query).first() is None:
                text = json.dumps(asked, sort_keys=True)
                connection.execute(sql.insert(REQUESTS).values(request_id=request_id, asked=text))

    def answer(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """The answer that the same request gets again."""
        with self._database.writing() as connection:
            query = sql.update(REQUESTS).where(REQUESTS.c.request_id == request_id)
            connection.execute(query.values(answer=json.dumps(answer)))


def _adopt(connection: Connection, storage: str) -> None:
    if connection.execute(sql.select(SOURCE.c.url)).scalars().all() != [storage]:
        for table in (SAVES, CATALOG, REQUESTS, DECISIONS, SOURCE):
            connection.execute(sql.delete(table))
        connection.execute(sql.insert(SOURCE).values(url=storage))


def _values(job: JobName, ref: CheckpointRef) -> dict[str, Any]:
    return {"project": job.project, "uid": job.uid, "attempt": ref.attempt, "step": ref.step}


def _of(table: sql.Table, job: JobName) -> sql.ColumnElement[bool]:
    return sql.and_(table.c.project == job.project, table.c.uid == job.uid)


def _is(table: sql.Table, job: JobName, ref: CheckpointRef) -> sql.ColumnElement[bool]:
    return sql.and_(_of(table, job), table.c.attempt == ref.attempt, table.c.step == ref.step)


def _entry(row: Any) -> Entry:
    return Entry(row.num_bytes, row.world_size, datetime.fromtimestamp(row.created_us / 1_000_000, UTC))
