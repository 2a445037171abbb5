"""The process that runs the engine."""
