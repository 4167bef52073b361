"""Exports checkpoints for other systems, one tensor at a time."""
