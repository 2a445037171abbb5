"""Sampling: from logits to tokens, on the device."""
