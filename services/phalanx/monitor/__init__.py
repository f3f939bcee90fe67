"""The monitor: curves, ranks, GPUs, and verdicts on what goes wrong. It measures and judges; train acts."""
