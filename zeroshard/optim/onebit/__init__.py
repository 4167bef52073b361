"""Optimizers whose ranks average one bit per parameter instead of gradients."""
