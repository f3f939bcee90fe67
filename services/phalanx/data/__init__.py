"""The data service (README.md): catalog, reading plans, damage decisions; and what works without it: text into shards,
read-only looks at datasets, the proof of a run.
"""
