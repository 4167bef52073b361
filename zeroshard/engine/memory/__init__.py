"""The memory of training state: units, their buffers on each tier, the memory of peers, and placeholders."""
