"""The fuzz targets: places that read bytes of clients, of files, and of other processes."""

TARGETS = (
    "gguf_file",
    "group_frame",
    "http_body",
    "safetensors_file",
    "server_frame",
    "step_plans",
    "tool_calls",
    "torch_bin",
    "torch_pickle",
)
"""Modules of ``tests.fuzzing.targets``. They are imported by name, so that a fuzzer can see their imports."""
