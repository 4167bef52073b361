"""Traces a real module on the meta device: what it holds and which kernels it launches."""
