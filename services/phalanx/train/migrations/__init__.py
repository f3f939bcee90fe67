"""Schema of the train service's database, by alembic."""
