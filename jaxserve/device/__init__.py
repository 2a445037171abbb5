"""Run models on devices: plan memory, compile steps, build batches, launch."""
