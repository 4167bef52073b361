"""Chooses a plan, says why not the others, and finds changes that make a config fit."""
