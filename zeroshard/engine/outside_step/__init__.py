"""Access to a sharded model between steps: whole values, external parameters, memory use, offloading its state."""
