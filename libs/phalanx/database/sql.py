"""Opens a database, migrates it, and hands out transactions.

On SQLite every transaction is begun here and not by the driver, which would keep each table of a migration at once: a
kill half-way leaves the old schema. A transaction that writes takes its lock at its beginning, so that it waits for
other writers at once and not half-way; readers never wait.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from phalanx.core.errors import OutsideError, PhalanxError

BUSY_TIMEOUT_S: Final = 30.0
_SCRIPTS: Final = Path(__file__).parent / "scripts"
_WRITES: Final = "phalanx_writes"
_PAUSE_S: Final = 0.01
_UNREADABLE: Final = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class SqlDatabase:
    """The database at `url` (SQLAlchemy's form, with its password). Safe for several threads.

    migrations: folder of the service's migrations; version_table: where the schema's version is noted, one for each
    service, so that several may share a PostgreSQL database. is_durable: a commit survives the loss of power, also on
    SQLite; without it the newest ones may be lost then, and none when a process is killed.
    Raises PhalanxError for a URL that no database has, and for a file of SQLite's that is damaged or none: to open it
    again would not help. Everything raises OutsideError where the database fails, with the database's own error as its
    cause.
    """

    def __init__(self, url: str, migrations: Path, version_table: str, *, is_durable: bool = False) -> None:
        self._engine = _engine(url, is_durable=is_durable)
        # Threads of one process take turns here; SQLite itself lets whoever asks at the right moment in.
        self._turn: AbstractContextManager[Any] = Lock() if self._engine.dialect.name == "sqlite" else nullcontext()
        config = Config()
        config.set_main_option("script_location", str(_SCRIPTS))
        config.set_main_option("version_locations", str(migrations))
        config.set_main_option("path_separator", "os")
        config.attributes["version_table"] = version_table
        try:
            self._migrate(config)
        except OutsideError as error:
            if not _is_unreadable(error.__cause__):
                raise
            path = self._engine.url.database
            raise PhalanxError(
                "database",
                value=path,
                expected=f"a whole database of SQLite's ({_first_line(_own(error.__cause__))})",
                remedy=_remedy(path),
            ) from error

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that only reads."""
        with self._telling(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that writes; committed when the block is left without an error."""
        with self._telling(), self._turn, self._engine.execution_options(**{_WRITES: True}).begin() as connection:
            yield connection

    def _migrate(self, config: Config) -> None:
        with self.writing() as connection:
            config.attributes["connection"] = connection
            upgrade: Callable[[Config, str], None] = command.upgrade
            upgrade(config, "head")

    def close(self) -> None:
        """Ends the connections."""
        self._engine.dispose()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            where = self._engine.url.render_as_string(hide_password=True)
            more = f"; {_remedy(self._engine.url.database)}" if _is_unreadable(error) else ""
            raise OutsideError(f"database {where} failed: {_first_line(error)}{more}") from error


def _engine(url: str, *, is_durable: bool) -> sa.Engine:
    try:
        engine = sa.create_engine(make_url(url), pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise PhalanxError(
            "database.url",
            expected="sqlite:///FILE, or postgresql+psycopg://HOST/NAME with the extra phalanx[postgres] "
            f"({_first_line(error)})",
            remedy="correct it in the service's file",
        ) from error
    if engine.dialect.name == "sqlite":
        pragmas = (
            f"busy_timeout={int(BUSY_TIMEOUT_S * 1000)}",
            "journal_mode=WAL",
            f"synchronous={'FULL' if is_durable else 'NORMAL'}",
        )
        sa.event.listen(engine, "connect", lambda connection, _: _set_up_sqlite(connection, pragmas))
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, pragmas: tuple[str, ...]) -> None:
    connection.isolation_level = None
    end_s = time.monotonic() + BUSY_TIMEOUT_S
    for pragma in pragmas:
        while True:
            try:
                connection.execute(f"PRAGMA {pragma}").close()
                break
            except sqlite3.OperationalError as error:
                # The change of a new file to WAL does not wait by itself for others that open it at the same time.
                is_busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not is_busy or time.monotonic() > end_s:
                    raise
                time.sleep(_PAUSE_S)


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _own(error: BaseException | None) -> BaseException | None:
    """The driver's error in one of SQLAlchemy's."""
    return error.orig if isinstance(error, DBAPIError) else error


def _is_unreadable(error: BaseException | None) -> bool:
    """Whether SQLite finds that the file is no database, or a damaged one; it stays so."""
    own = _own(error)
    return isinstance(own, sqlite3.DatabaseError) and getattr(own, "sqlite_errorcode", 0) & 0xFF in _UNREADABLE


def _remedy(path: str | None) -> str:
    return f"end the service, delete {path} (and {path}-wal) and start it again: it is made anew from storage"


def _first_line(error: BaseException | None) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
