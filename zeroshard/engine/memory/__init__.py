"""Where state lies: units on the device and in host memory, the memory of peers, and what stands in for it."""
