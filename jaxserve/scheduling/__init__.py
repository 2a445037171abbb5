"""Which sequences run next and on which KV pages, in plain Python: no JAX, no arrays on a device."""
