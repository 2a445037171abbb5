"""Requests from admission to their last output: the engine, composed of what the other rooms do."""
