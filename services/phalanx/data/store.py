"""The catalog's database: a copy of the registry in storage, for lists and look-ups. Nothing is in it alone.

SQLite or PostgreSQL by URL; alembic brings it to the newest schema when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.datasets import DatasetVersion, decode, key_of
from phalanx.lineage import DamagedObject

METADATA = sa.MetaData()
VERSIONS: Final = sa.Table(
    "dataset_versions",
    METADATA,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("digest", sa.String(80), nullable=False),
    sa.Column("request_id", sa.String(200), nullable=False, index=True),
    sa.Column("body", sa.Text, nullable=False),
)
SOURCE: Final = sa.Table("source", METADATA, sa.Column("url", sa.Text, primary_key=True))
_MIGRATIONS = Path(__file__).parent / "migrations"
_WRITES: Final = "phalanx_writes"


class CatalogStore:
    """The database at `url` (SQLAlchemy's form), a copy of the registry at `source` (a storage URL).

    A copy of another registry is emptied. Raises PhalanxError for a URL that no database has, OutsideError where the
    database fails. Safe for several threads.
    """

    def __init__(self, url: str, source: str) -> None:
        self._engine = _engine(url)
        with self._telling():
            _migrate(self._engine)
        self._adopt(source)

    def close(self) -> None:
        """Ends the connections."""
        self._engine.dispose()

    def add(self, versions: Iterable[DatasetVersion]) -> None:
        """Enters versions; those that are there already stay as they are."""
        with self._write() as connection:
            for version in versions:
                here = (VERSIONS.c.dataset == version.dataset) & (VERSIONS.c.version == version.version)
                if connection.execute(sa.select(VERSIONS.c.version).where(here)).first() is None:
                    connection.execute(sa.insert(VERSIONS).values(**_row(version)))

    def remove(self, places: Iterable[tuple[str, int]]) -> None:
        """Forgets versions that storage does not have."""
        with self._write() as connection:
            for dataset, number in places:
                here = (VERSIONS.c.dataset == dataset) & (VERSIONS.c.version == number)
                connection.execute(sa.delete(VERSIONS).where(here))

    def places(self, dataset: str | None = None) -> frozenset[tuple[str, int]]:
        """(dataset, version) of all that is in it, or of one dataset."""
        query = sa.select(VERSIONS.c.dataset, VERSIONS.c.version)
        if dataset is not None:
            query = query.where(VERSIONS.c.dataset == dataset)
        return frozenset((row.dataset, row.version) for row in self._rows(query))

    def versions(self, dataset: str) -> tuple[DatasetVersion, ...]:
        """All versions of a dataset, oldest first."""
        return self._versions(_SELECT.where(VERSIONS.c.dataset == dataset).order_by(VERSIONS.c.version))

    def by_request(self, request_id: str) -> DatasetVersion | None:
        """What was registered with that request id."""
        query = _SELECT.where(VERSIONS.c.request_id == request_id)
        return next(iter(self._versions(query.order_by(VERSIONS.c.dataset, VERSIONS.c.version).limit(1))), None)

    def by_digest(self, dataset: str, digest: str) -> DatasetVersion | None:
        """The oldest version of the dataset with that content."""
        query = _SELECT.where(VERSIONS.c.dataset == dataset, VERSIONS.c.digest == digest)
        return next(iter(self._versions(query.order_by(VERSIONS.c.version).limit(1))), None)

    def newest(self, after: str, limit: int) -> tuple[DatasetVersion, ...]:
        """The newest version of each dataset whose name comes after `after`, by name, at most `limit`."""
        tops = (
            sa.select(VERSIONS.c.dataset, sa.func.max(VERSIONS.c.version).label("version"))
            .where(VERSIONS.c.dataset > after)
            .group_by(VERSIONS.c.dataset)
            .order_by(VERSIONS.c.dataset)
            .limit(limit)
            .subquery()
        )
        is_top = (VERSIONS.c.dataset == tops.c.dataset) & (VERSIONS.c.version == tops.c.version)
        return self._versions(_SELECT.join(tops, is_top).order_by(VERSIONS.c.dataset))

    def _adopt(self, source: str) -> None:
        with self._write() as connection:
            known = connection.execute(sa.select(SOURCE.c.url)).scalars().all()
            if known != [source]:
                connection.execute(sa.delete(VERSIONS))
                connection.execute(sa.delete(SOURCE))
                connection.execute(sa.insert(SOURCE).values(url=source))

    def _versions(self, query: sa.Select[Any]) -> tuple[DatasetVersion, ...]:
        return tuple(_version(row) for row in self._rows(query))

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._telling(), self._engine.begin() as connection:
            return connection.execute(query).all()

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with self._telling(), self._engine.execution_options(**{_WRITES: True}).begin() as connection:
            yield connection

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            where = self._engine.url.render_as_string(hide_password=True)
            raise OutsideError(f"database {where} failed: {_first_line(error)}") from error


_SELECT = sa.select(VERSIONS.c.dataset, VERSIONS.c.version, VERSIONS.c.body)


def _row(version: DatasetVersion) -> dict[str, object]:
    return {
        "dataset": version.dataset,
        "version": version.version,
        "digest": version.digest,
        "request_id": version.request_id,
        "body": version.encode().decode(),
    }


def _version(row: sa.Row[Any]) -> DatasetVersion:
    try:
        return decode(key_of(row.dataset, row.version), row.body.encode())
    except DamagedObject as error:
        raise OutsideError(f"the database is damaged: {error}; delete it, it is rebuilt from storage") from error


def _engine(url: str) -> sa.Engine:
    try:
        parsed = make_url(url)
        engine = sa.create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise PhalanxError(
            "database.url",
            expected=f"sqlite:///FILE or postgresql+psycopg://HOST/NAME ({_first_line(error)})",
            remedy="correct the configuration of the data service",
        ) from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    """Readers never wait for a writer, and a writer waits for another. The driver begins no transaction by itself."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    """Begins a transaction that holds tables too, so that a kill in a migration leaves the old schema; one that writes
    waits for others at once, not half-way.
    """
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: sa.Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with engine.execution_options(**{_WRITES: True}).begin() as connection:
        config.attributes["connection"] = connection
        upgrade: Callable[[Config, str], None] = command.upgrade
        upgrade(config, "head")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
