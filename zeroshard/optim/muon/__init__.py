"""Muon: whole matrices at their owners, made orthogonal."""
