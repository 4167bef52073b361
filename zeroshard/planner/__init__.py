"""The planner: what a plan takes and how long its step is, before any GPU is rented. `zeroshard plan` is its face."""
