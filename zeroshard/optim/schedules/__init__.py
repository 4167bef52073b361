"""Learning-rate schedules by the names that configs use."""
