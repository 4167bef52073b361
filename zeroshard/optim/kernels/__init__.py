"""Kernels over flat state for GPUs, in Triton, each with a twin in plain PyTorch that serves as its oracle."""
