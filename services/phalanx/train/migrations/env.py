"""Run by alembic: applies the migrations on the connection that the service hands over."""

from alembic import context

from phalanx.train.store import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
    version_table="train_schema_version",
)
with context.begin_transaction():
    context.run_migrations()
