"""The catalog's database: a copy of the registry in storage, for lists and look-ups. Nothing is in it alone.

SQLite or PostgreSQL by URL; alembic brings it to the newest schema when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from phalanx.core.errors import OutsideError
from phalanx.data.datasets import DatasetVersion, Filter, decode, key_of
from phalanx.database import SqlDatabase
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


class CatalogStore:
    """The database at `url` (SQLAlchemy's form), a copy of the registry at `source` (a storage URL).

    A copy of another registry is emptied. Raises PhalanxError for a URL that no database has, OutsideError where the
    database fails. Safe for several threads.
    """

    def __init__(self, url: str, source: str) -> None:
        self._database = SqlDatabase(url, _MIGRATIONS, "data_schema_version")
        self._adopt(source)

    def close(self) -> None:
        """Ends the connections."""
        self._database.close()

    def add(self, versions: Iterable[DatasetVersion]) -> None:
        """Enters versions; those that are there already stay as they are."""
        with self._database.writing() as connection:
            for version in versions:
                here = (VERSIONS.c.dataset == version.dataset) & (VERSIONS.c.version == version.version)
                if connection.execute(sa.select(VERSIONS.c.version).where(here)).first() is None:
                    connection.execute(sa.insert(VERSIONS).values(**_row(version)))

    def remove(self, places: Iterable[tuple[str, int]]) -> None:
        """Forgets versions that storage does not have."""
        with self._database.writing() as connection:
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

    def listed(self, after: tuple[str, int], wanted: Filter, batch: int) -> Iterator[DatasetVersion]:
        """The newest version of each dataset, or all versions where `wanted` asks for those, by name and number, behind
        the place `after`; read `batch` at a time. Only names are looked at here.
        """
        while True:
            found = self._versions(_after(after, wanted).limit(batch))
            yield from found
            if len(found) < batch:
                return
            after = found[-1].dataset, found[-1].version

    def _adopt(self, source: str) -> None:
        with self._database.writing() as connection:
            known = connection.execute(sa.select(SOURCE.c.url)).scalars().all()
            if known != [source]:
                connection.execute(sa.delete(VERSIONS))
                connection.execute(sa.delete(SOURCE))
                connection.execute(sa.insert(SOURCE).values(url=source))

    def _versions(self, query: sa.Select[Any]) -> tuple[DatasetVersion, ...]:
        return tuple(_version(row) for row in self._rows(query))

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._database.reading() as connection:
            return connection.execute(query).all()


_SELECT = sa.select(VERSIONS.c.dataset, VERSIONS.c.version, VERSIONS.c.body)


def _after(place: tuple[str, int], wanted: Filter) -> sa.Select[Any]:
    dataset, number = place
    behind: sa.ColumnElement[bool]
    query = _SELECT.where(VERSIONS.c.dataset.startswith(wanted.name_prefix, autoescape=True))
    if wanted.wants_all_versions:
        same: sa.ColumnElement[bool] = (VERSIONS.c.dataset == dataset) & (VERSIONS.c.version > number)
        behind = same | (VERSIONS.c.dataset > dataset)
    else:
        tops = sa.select(VERSIONS.c.dataset, sa.func.max(VERSIONS.c.version).label("top"))
        newest = tops.group_by(VERSIONS.c.dataset).subquery()
        is_newest = (VERSIONS.c.dataset == newest.c.dataset) & (VERSIONS.c.version == newest.c.top)
        query, behind = query.join(newest, is_newest), VERSIONS.c.dataset > dataset
    return query.where(behind).order_by(VERSIONS.c.dataset, VERSIONS.c.version)


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
