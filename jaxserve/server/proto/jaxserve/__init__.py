"""The protocols by package; modules here are generated."""
