"""Layouts and meshes beside each other: planned, then run."""
