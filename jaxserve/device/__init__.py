"""What runs on devices: building and compiling steps, batching rows, launching, memory."""
