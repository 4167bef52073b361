"""Checkpoints of a sharded model, files of weights, and saving before the machine goes."""
