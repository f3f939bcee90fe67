"""Jobs and their events, and which registry they are a copy of."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "jobs",
        sa.Column("project", sa.String(64), primary_key=True),
        sa.Column("uid", sa.String(64), primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("project", sa.String(64), primary_key=True),
        sa.Column("uid", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table("source", sa.Column("url", sa.Text, primary_key=True))


def downgrade() -> None:
    """Drops them; storage has it all."""
    op.drop_table("source")
    op.drop_table("events")
    op.drop_table("jobs")
