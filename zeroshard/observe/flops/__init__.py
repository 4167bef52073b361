"""FLOPs as the operations say that run: of a model called once, and of a step of an engine."""
