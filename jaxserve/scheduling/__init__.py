"""Schedule sequences and allocate KV pages in plain Python, without JAX or device arrays."""
