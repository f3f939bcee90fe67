"""The data service's libraries: preparation of text into shards, and read-only looks at datasets (catalog,
verification, traces).
"""
