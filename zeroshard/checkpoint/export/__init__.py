"""Checkpoints written for other systems, one tensor at a time."""
