"""What comes from elsewhere than train: OpenTelemetry by whoever sends it, GPUs by exporter or driver."""
