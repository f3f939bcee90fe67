"""What alembic runs: the migrations on the connection that the store gives it."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

connection = context.config.attributes["connection"]
assert isinstance(connection, Connection)
context.configure(connection=connection, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
