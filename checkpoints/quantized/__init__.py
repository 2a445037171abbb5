"""Quantized checkpoints: each format in a file of its own, read as the float weights that it stands for."""
