"""Sequences that are divided over ranks: the axis, what attention exchanges, and how batches are cut."""
