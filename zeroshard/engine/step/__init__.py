"""Optimizer steps: which stepper runs one, on which regions, with which norm."""
