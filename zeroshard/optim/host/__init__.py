"""Optimizer steps by the processor on state in host memory: one pass, native where a compiler was there."""
