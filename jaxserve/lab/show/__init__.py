"""Drawings of what each device holds and computes."""
