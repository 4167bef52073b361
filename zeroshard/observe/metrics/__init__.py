"""Metrics for Prometheus: each rank leaves its numbers in a file, and one exporter per node serves all files."""
