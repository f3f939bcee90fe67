"""Saves, catalog, requests, and which cluster they are of."""

import sqlalchemy as sql
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table("saves", *_key_columns(), sql.Column("state", sql.String(16), nullable=False))
    op.create_table(
        "catalog",
        *_key_columns(),
        sql.Column("num_bytes", sql.BigInteger, nullable=False),
        sql.Column("world_size", sql.BigInteger, nullable=False),
        sql.Column("created_us", sql.BigInteger, nullable=False),
    )
    op.create_table(
        "requests",
        sql.Column("request_id", sql.String(200), primary_key=True),
        sql.Column("asked", sql.Text, nullable=False),
        sql.Column("answer", sql.Text),
    )
    op.create_table("source", sql.Column("url", sql.Text, primary_key=True))


def downgrade() -> None:
    """Removes them; everything in them is found again in storage."""
    for name in ("saves", "catalog", "requests", "source"):
        op.drop_table(name)


def _key_columns() -> tuple[sql.Column[object], ...]:
    return (
        sql.Column("project", sql.String(63), primary_key=True),
        sql.Column("uid", sql.String(63), primary_key=True),
        sql.Column("attempt", sql.BigInteger, primary_key=True, autoincrement=False),
        sql.Column("step", sql.BigInteger, primary_key=True, autoincrement=False),
    )
