"""Moves a running engine to another mesh: weights, cached pages and requests."""
