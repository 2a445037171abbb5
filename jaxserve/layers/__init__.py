"""Shared building blocks of the models: linear, embedding, attention, norm, rope and MLP."""
