"""GPUs, clusters, and what the doctor measures of this machine."""
