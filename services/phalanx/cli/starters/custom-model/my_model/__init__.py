"""A language model of your own, and what it minimises. Phalanx imports it by the names in job.toml."""
