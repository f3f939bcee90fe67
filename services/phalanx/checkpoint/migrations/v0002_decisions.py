"""Which manifest counts as a checkpoint, for stores that cannot tell."""

import sqlalchemy as sql
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "decisions",
        sql.Column("project", sql.String(63), primary_key=True),
        sql.Column("uid", sql.String(63), primary_key=True),
        sql.Column("attempt", sql.BigInteger, primary_key=True, autoincrement=False),
        sql.Column("step", sql.BigInteger, primary_key=True, autoincrement=False),
        sql.Column("digest", sql.String(64), nullable=False),
    )


def downgrade() -> None:
    """Removes it; with a create-only put the store itself decides."""
    op.drop_table("decisions")
