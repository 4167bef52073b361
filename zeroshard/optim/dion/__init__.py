"""Dion: matrices updated from low-rank factors, which are summed over the ranks."""
