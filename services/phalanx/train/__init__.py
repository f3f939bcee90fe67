"""The train service: jobs, from their submission to their end. It alone acts on a run (README.md)."""
