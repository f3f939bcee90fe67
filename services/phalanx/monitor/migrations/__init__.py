"""The monitor's tables, version by version."""
