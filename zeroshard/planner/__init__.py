"""The planner: predicts memory, time and cost of plans before any GPU is rented. Its command is `zeroshard plan`."""
