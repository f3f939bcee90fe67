"""What alembic runs; see `phalanx.database.sql`."""
