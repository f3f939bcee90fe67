"""A service's own database: SQLite or PostgreSQL by URL, brought to the newest schema when it is opened."""

from phalanx.database.sql import SqlDatabase

__all__ = ["SqlDatabase"]
