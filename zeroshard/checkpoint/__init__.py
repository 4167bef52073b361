"""Checkpoints: safetensors and JSON, by parameter name and global slice, readable at any world size.

This package knows nothing of the engine: a run hands it `Piece`s to write and asks it for parts of named tensors. The
format is described in `manifest`; whoever reads checkpoints uses `reader.CheckpointReader`.
"""
