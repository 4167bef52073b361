"""Checkpoints of a sharded model, files of weights, and saving when the job is told to stop."""
