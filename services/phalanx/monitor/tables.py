"""The tables as the newest migration leaves them."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()
RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("state", sa.Integer),
    sa.Column("step", sa.BigInteger),
    sa.Column("num_steps", sa.BigInteger),
    sa.Column("loss", sa.Float(53)),
    sa.Column("tokens_per_second", sa.Float(53)),
    sa.Column("step_time_s", sa.Float(53)),
    sa.Column("attempt", sa.BigInteger),
    sa.Column("num_missed", sa.BigInteger),
    sa.Column("heard", sa.BigInteger),  # order of the last save: for retention
    sa.Column("attempts", sa.Text),  # JSON
    sa.Column("evaluations", sa.Text),  # JSON
)
PIECES = sa.Table(
    "pieces",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("data", sa.LargeBinary),
)
EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, primary_key=True),
    sa.Column("data", sa.LargeBinary),
)
INCIDENTS = sa.Table(
    "incidents",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger),
    sa.Column("job", sa.Text),
    sa.Column("attempt", sa.BigInteger),
    sa.Column("step", sa.BigInteger),
    sa.Column("last_step", sa.BigInteger),
    sa.Column("cause", sa.LargeBinary),
    sa.Column("action", sa.Text),
    sa.Column("outcome", sa.Text),
    sa.Column("time_ns", sa.BigInteger),
    sa.Column("is_reported", sa.Boolean),
    sa.Column("is_alerted", sa.Boolean),
)
FIGURES = sa.Table(
    "figures",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("text", sa.Text),
    sa.Column("number", sa.BigInteger),
)
GPU_FAULTS = sa.Table(
    "gpu_faults",
    METADATA,
    sa.Column("gpu", sa.Text, primary_key=True),
    sa.Column("xid", sa.BigInteger),
    sa.Column("ecc_uncorrectable", sa.BigInteger),
)
