"""What may be asked of a sharded model between steps: whole values, external parameters, its memory for a while."""
