"""The catalog of dataset versions, and which registry it is a copy of."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "dataset_versions",
        sa.Column("dataset", sa.String(128), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("ix_dataset_versions_request_id", "dataset_versions", ["request_id"])
    op.create_table("source", sa.Column("url", sa.Text, primary_key=True))


def downgrade() -> None:
    """Drops them; the registry in storage has it all."""
    op.drop_table("source")
    op.drop_table("dataset_versions")
