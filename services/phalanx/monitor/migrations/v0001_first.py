"""Runs with their curves, evaluations, events, attempts and incidents; how far the records were read; GPU faults."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "runs",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("num_steps", sa.BigInteger, nullable=False),
        sa.Column("loss", sa.Float(53)),
        sa.Column("tokens_per_second", sa.Float(53)),
        sa.Column("step_time_s", sa.Float(53)),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("num_missed", sa.BigInteger, nullable=False),
        sa.Column("heard", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Text, nullable=False),
        sa.Column("evaluations", sa.Text, nullable=False),
    )
    op.create_table(
        "pieces",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "incidents",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False, unique=True),
        sa.Column("job", sa.Text, nullable=False, index=True),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("cause", sa.LargeBinary, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("time_ns", sa.BigInteger, nullable=False),
        sa.Column("is_reported", sa.Boolean, nullable=False),
        sa.Column("is_alerted", sa.Boolean, nullable=False),
    )
    op.create_table(
        "figures",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "gpu_faults",
        sa.Column("gpu", sa.Text, primary_key=True),
        sa.Column("xid", sa.BigInteger, nullable=False),
        sa.Column("ecc_uncorrectable", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Measurements are made again from storage: there is no way back."""
    raise NotImplementedError("start with an empty database instead")
