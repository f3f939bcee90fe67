"""The last picture of the load of all experts, beside each run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("runs", sa.Column("expert_heat", sa.LargeBinary))


def downgrade() -> None:
    """Measurements are made again from storage: there is no way back."""
    raise NotImplementedError("start with an empty database instead")
