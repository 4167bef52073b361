"""zeroshard: ZeRO training for PyTorch from a plan that is a value."""

__version__ = "0.1.0"
