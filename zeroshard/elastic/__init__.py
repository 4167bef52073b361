"""A rank's side of an elastic job: its place in each round, and what it keeps in memory from one to the next."""
