"""Checkpoints: safetensors and JSON, by parameter name and global slice, readable at any world size.

This package does not import the engine: a run gives it `Piece`s to write, and asks it for parts of named tensors. The
format is described in `manifest`; code that reads checkpoints uses `reader.CheckpointReader`.
"""
