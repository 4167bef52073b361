"""Predicts what a plan takes: memory, traffic, time and money."""
