"""The log of a run, one line of JSON per step, and what is told from it: explain, report; and top, from the metrics."""
