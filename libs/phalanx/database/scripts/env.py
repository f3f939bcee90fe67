"""Run by alembic: applies a service's migrations on the connection that `phalanx.database` hands over."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], render_as_batch=True, version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
