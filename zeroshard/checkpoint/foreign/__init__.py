"""Reads checkpoints of other systems without running code that is in them."""
