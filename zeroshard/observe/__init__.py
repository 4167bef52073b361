"""What is seen of a run: monitors, timers, counts of traffic and FLOPs, metrics. Built only where a config asks."""
