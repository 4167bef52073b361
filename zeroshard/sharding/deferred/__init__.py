"""Deferred initialisation: a model is recorded while it is built, and drawn tensor by tensor later."""
