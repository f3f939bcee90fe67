"""The database's schema, version by version; applied when the service opens it."""
