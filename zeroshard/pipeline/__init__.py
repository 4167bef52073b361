"""Pipelines: layers in stages, the schedules that run their micro-batches, and the engine with DeepSpeed's calls."""
