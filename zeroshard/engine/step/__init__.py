"""Optimizer steps: the steppers that run them, their regions, and the schedule beside them."""
