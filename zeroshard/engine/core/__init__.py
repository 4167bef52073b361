"""What runs in a step, and what it runs on: lists, streams, gathers and reduces, and the handle that holds them."""
