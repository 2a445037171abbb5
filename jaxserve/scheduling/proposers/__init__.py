"""Proposers of draft tokens that run on the host, one file each."""
