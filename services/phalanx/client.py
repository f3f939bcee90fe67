"""The typed client of all services."""
