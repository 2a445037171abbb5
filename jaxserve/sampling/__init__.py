"""Sample tokens from logits, on the device."""
