"""A service's database: opened by many at once, killed in a migration, told clearly when its URL is none."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from phalanx.checkpoint import store as checkpoint
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data import store as data
from phalanx.database import SqlDatabase
from phalanx.monitor import store as monitor
from phalanx.monitor import tables
from phalanx.train import store as train

OPEN: dict[str, Callable[[str], object]] = {
    "data": lambda url: data.CatalogStore(url, "memory://root"),
    "train": lambda url: train.JobStore(url, "memory://root"),
    "checkpoint": lambda url: checkpoint.Database(url, "memory://root"),
    "monitor": lambda url: monitor.MonitorStore(url),
}
METADATA = {
    "data": data.METADATA,
    "train": train.METADATA,
    "checkpoint": checkpoint._METADATA,
    "monitor": tables.METADATA,
}

MIGRATIONS = Path(data.__file__).parent / "migrations"

# Opens a service's database and is killed once its last table is made, before the transaction ends.
KILLED = """
    import os, signal, sys
    from alembic import command
    from test_sql_database import OPEN
    upgrade = command.upgrade
    def killed(*arguments):
        upgrade(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    command.upgrade = killed
    OPEN[sys.argv[1]](sys.argv[2])
"""


@pytest.mark.parametrize("service", OPEN)
def test_database_killed_in_its_migration_is_opened_again_as_if_nothing_had_been(service: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/one.sqlite"
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), service, url],
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    engine = sa.create_engine(url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()

    OPEN[service](url)


@pytest.mark.parametrize("service", OPEN)
def test_database_migrations_make_the_schema_that_the_code_knows(service: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/one.sqlite"
    OPEN[service](url)
    OPEN[service](url)

    engine, version_table = sa.create_engine(url), f"{service}_schema_version"
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": version_table})
        found = [each for each in compare_metadata(context, METADATA[service]) if version_table not in repr(each)]
    engine.dispose()
    assert found == []


@pytest.mark.parametrize("service", OPEN)
def test_database_opened_by_many_at_once_is_one(service: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: OPEN[service](f"sqlite:///{tmp_path}/one.sqlite"), range(6)))


@pytest.mark.parametrize("url", ["nonsense", "nodatabase://x", "sqlite+nodriver:///x"])
def test_database_url_that_no_database_has_is_refused_by_its_key(url: str) -> None:
    with pytest.raises(PhalanxError, match=r"database\.url"):
        OPEN["data"](url)


def test_database_that_cannot_be_opened_is_an_outside_error_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(OutsideError, match=r"database sqlite:.* failed") as raised:
        OPEN["data"](f"sqlite:///{tmp_path}/no/such/folder.sqlite")
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("service", OPEN)
@pytest.mark.parametrize("data", [os.urandom(20_000), b"short", b"SQLite format 3\0" + b"\xff" * 20_000])
def test_database_file_that_is_none_is_refused_with_its_name_and_the_remedy(
    service: str, data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "one.sqlite"
    path.write_bytes(data)
    with pytest.raises(PhalanxError) as raised:
        OPEN[service](f"sqlite:///{path}")
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"database is '{path}': expected a whole database of SQLite's (file is not a database)")
    assert f"delete {path} " in line and "made anew from storage" in line
    assert path.read_bytes() == data

    path.unlink()
    OPEN[service](f"sqlite:///{path}")


@pytest.mark.parametrize("service", OPEN)
def test_database_whose_pages_are_damaged_is_refused_when_it_is_opened(service: str, tmp_path: Path) -> None:
    path = tmp_path / "one.sqlite"
    OPEN[service](f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * (len(data) - 100))
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    with pytest.raises(PhalanxError, match="database disk image is malformed"):
        OPEN[service](f"sqlite:///{path}")


def test_database_damaged_while_it_is_in_use_is_an_outside_error_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "one.sqlite"
    database = SqlDatabase(f"sqlite:///{path}", MIGRATIONS, "data_schema_version")
    database.close()  # the next transaction opens a connection again
    path.write_bytes(os.urandom(20_000))
    with (
        pytest.raises(OutsideError, match=r"failed: .*not a database; .*delete .*made anew from storage"),
        database.reading(),
    ):
        pass
