"""Protocols between processes of one server."""
