"""The table of operations: for each, the modules that implement it, best first."""

import importlib
from types import ModuleType

OPERATIONS: dict[str, dict[str, str]] = {
    "paged_attention": {"xla": "pallas_kernels.paged_attention_xla"},
}


class UnsupportedKernelError(NotImplementedError):
    """No implementation of an operation can do what was asked; the message gives every reason."""


def select(operation: str, *, platform: str, device_kind: str, dtype: str, name: str | None = None) -> ModuleType:
    """The implementation of an operation to use on a device.

    An implementation is a module with the operation's functions and ``unsupported(platform, device_kind, dtype)``,
    which returns the reason why it cannot run there, or None.

    Args:
        operation: A key of ``OPERATIONS``.
        platform: JAX's platform name, such as ``cpu`` or ``gpu``.
        device_kind: The device's own name, as ``jax.Device.device_kind``.
        dtype: Element type of the operands.
        name: Take this implementation and no other; None takes the first that can.

    Raises:
        ValueError: Unknown operation or implementation name.
        UnsupportedKernelError: None of the candidates can run there.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; operations: {', '.join(OPERATIONS)}")
    table = OPERATIONS[operation]
    if name is not None and name not in table:
        raise ValueError(f"unknown implementation {name!r} of {operation}; implementations: {', '.join(table)}")
    reasons = []
    for candidate in table if name is None else (name,):
        module = importlib.import_module(table[candidate])
        reason = module.unsupported(platform, device_kind, dtype)
        if reason is None:
            return module
        reasons.append(f"{candidate}: {reason}")
    raise UnsupportedKernelError(f"no {operation} for {dtype} on {device_kind} ({platform}): {'; '.join(reasons)}")
