"""Sharding layouts, one per file, listed in ``sharding.registry``."""
