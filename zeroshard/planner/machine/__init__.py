"""GPUs and clusters, and what `zeroshard doctor` measures on this machine."""
