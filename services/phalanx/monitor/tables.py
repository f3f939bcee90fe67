"""The tables as the newest migration leaves them."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()
RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("state", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("num_steps", sa.BigInteger, nullable=False),
    sa.Column("loss", sa.Float(53)),
    sa.Column("tokens_per_second", sa.Float(53)),
    sa.Column("step_time_s", sa.Float(53)),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("num_missed", sa.BigInteger, nullable=False),
    sa.Column("heard", sa.BigInteger, nullable=False),  # order of the last save: for retention
    sa.Column("attempts", sa.Text, nullable=False),  # JSON
    sa.Column("evaluations", sa.Text, nullable=False),  # JSON
    sa.Column("expert_heat", sa.LargeBinary),  # the last record of it
)
PIECES = sa.Table(
    "pieces",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
INCIDENTS = sa.Table(
    "incidents",
    METADATA,
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
FIGURES = sa.Table(
    "figures",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
)
GPU_FAULTS = sa.Table(
    "gpu_faults",
    METADATA,
    sa.Column("gpu", sa.Text, primary_key=True),
    sa.Column("xid", sa.BigInteger, nullable=False),
    sa.Column("ecc_uncorrectable", sa.BigInteger, nullable=False),
)
