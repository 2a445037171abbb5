"""The table of operations and their implementations, best first.

An implementation is a module, or an object in one (``module:NAME``), with the operation's functions and
``unsupported``.
"""

import importlib
from typing import Any, NamedTuple, cast

from pallas_kernels.operation import Operation

OPERATIONS: dict[str, dict[str, str]] = {
    "int4_matmul": {
        "triton": "pallas_kernels.int4_matmul_triton",
        "xla": "pallas_kernels.int4_matmul_xla",
    },
    "grouped_matmul": {
        "triton": "pallas_kernels.grouped_matmul_triton",
        "native": "pallas_kernels.grouped_matmul_native",
        "xla": "pallas_kernels.grouped_matmul_xla",
    },
    "linear": {
        "native": "pallas_kernels.linear_native",
        "xla": "pallas_kernels.linear_xla",
    },
    "quantized_linear": {
        "native": "pallas_kernels.quantized_linear_native",
        "xla": "pallas_kernels.quantized_linear_xla",
    },
    "quantized_grouped_matmul": {
        "native": "pallas_kernels.quantized_grouped_matmul_native",
        "xla": "pallas_kernels.quantized_grouped_matmul_xla",
    },
    "argmax": {
        "native": "pallas_kernels.argmax_native",
        "xla": "pallas_kernels.argmax_xla",
    },
    "truncation": {
        "triton": "pallas_kernels.truncation_triton:TRITON",
        "native": "pallas_kernels.truncation_native",
        "xla": "pallas_kernels.truncation_xla",
        "pallas-interpret": "pallas_kernels.truncation_triton:INTERPRETED",
    },
    "qkv_write": {
        "triton": "pallas_kernels.qkv_write_triton:TRITON",
        "native": "pallas_kernels.qkv_write_native",
        "xla": "pallas_kernels.qkv_write_xla",
        "pallas-interpret": "pallas_kernels.qkv_write_triton:INTERPRETED",
    },
    "paged_attention": {
        "triton": "pallas_kernels.paged_attention_triton:TRITON",
        "mosaic": "pallas_kernels.paged_attention_mosaic:MOSAIC",
        "jax-triton": "pallas_kernels.paged_attention_jax_triton:JAX_TRITON",
        "native": "pallas_kernels.paged_attention_native",
        "xla": "pallas_kernels.paged_attention_xla",
        "pallas-interpret": "pallas_kernels.paged_attention_triton:INTERPRET",
        "mosaic-interpret": "pallas_kernels.paged_attention_mosaic:INTERPRET",
    },
    "latent_attention": {
        "mosaic": "pallas_kernels.latent_attention_mosaic:MOSAIC",
        "native": "pallas_kernels.latent_attention_native",
        "xla": "pallas_kernels.latent_attention_xla",
        "mosaic-interpret": "pallas_kernels.latent_attention_mosaic:INTERPRET",
    },
    "delta_net": {
        "triton": "pallas_kernels.delta_net_triton:TRITON",
        "native": "pallas_kernels.delta_net_native",
        "xla": "pallas_kernels.delta_net_xla",
        "pallas-interpret": "pallas_kernels.delta_net_triton:INTERPRETED",
    },
    "mamba2": {
        "triton": "pallas_kernels.mamba2_triton:TRITON",
        "native": "pallas_kernels.mamba2_native",
        "xla": "pallas_kernels.mamba2_xla",
        "pallas-interpret": "pallas_kernels.mamba2_triton:INTERPRETED",
    },
    "short_convolution": {
        "native": "pallas_kernels.short_convolution_native",
        "xla": "pallas_kernels.short_convolution_xla",
    },
}


class UnsupportedKernelError(NotImplementedError):
    """No implementation supports the device and sizes; the message has every reason."""


def operation(name: str) -> Operation:
    """Return an operation's own file: its cases, inputs and reference.

    Raises:
        ValueError: Unknown operation.
    """
    _implementations(name)
    return cast(Operation, importlib.import_module(f"pallas_kernels.{name}"))


class Choice(NamedTuple):
    """An implementation, its name, and why it was chosen."""

    name: str
    implementation: Any
    why: str


def choose(
    operation: str, *, platform: str, device_kind: str, dtype: str, name: str | None = None, **sizes: int
) -> Choice:
    """Return the implementation of an operation to use on a device, and why.

    Its ``unsupported(platform, device_kind, dtype, **sizes)`` returns the reason why it cannot run there, or None.

    Args:
        operation: A key of ``OPERATIONS``.
        platform: JAX's platform name, such as ``cpu`` or ``gpu``.
        device_kind: The device's own name, as ``jax.Device.device_kind``.
        dtype: Element type of the operands.
        name: Use this implementation and no other; None uses the first that can run and is not only for checks
            (an interpreted one).
        sizes: Sizes that decide whether an implementation can run; each operation's file lists them.

    Raises:
        ValueError: Unknown operation or implementation name.
        UnsupportedKernelError: None of the candidates can run there.
    """
    reasons = []
    for candidate in _candidates(operation, name):
        implementation = load(operation, candidate)
        reason = implementation.unsupported(platform, device_kind, dtype, **sizes)
        if reason is None:
            refused = "".join(f"; not {reason}" for reason in reasons)
            return Choice(candidate, implementation, "requested" if name else f"the first that can run{refused}")
        reasons.append(f"{candidate}: {reason}")
    asked = "".join(f", {size}={value}" for size, value in sizes.items())
    raise UnsupportedKernelError(
        f"no implementation of {operation} for {dtype}{asked} on {device_kind} ({platform}): {'; '.join(reasons)}"
    )


def select(operation: str, **where: Any) -> Any:
    """Return the implementation of an operation to use on a device; see ``choose``."""
    return choose(operation, **where).implementation


def load(operation: str, name: str) -> Any:
    """Return an implementation by its name, whether or not it can run here."""
    module, _, attribute = _implementations(operation)[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _candidates(operation: str, name: str | None) -> list[str]:
    """Return the candidates in order."""
    table = _implementations(operation)
    if name is None:
        return [row for row in table if not row.endswith("interpret")]
    if name not in table:
        raise ValueError(f"unknown implementation {name!r} of {operation}; implementations: {', '.join(table)}")
    return [name]


def _implementations(operation: str) -> dict[str, str]:
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; operations: {', '.join(OPERATIONS)}")
    return OPERATIONS[operation]
