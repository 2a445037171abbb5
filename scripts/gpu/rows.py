"""Which implementations the check runs."""

from pallas_kernels.registry import OPERATIONS

H200 = ("gpu", "NVIDIA H200")


def rows(is_tiny: bool) -> list[tuple[str, str]]:
    """List operations and implementations: all but interpreters for a GPU, XLA and interpreted Pallas-Triton for a CPU.

    Paged attention comes first: the engine cannot do without it, and it is the likeliest to be wrong.
    """
    names = sorted(OPERATIONS, key=lambda name: name != "paged_attention")
    found = [(name, row) for name in names for row in OPERATIONS[name]]
    if is_tiny:
        return [(name, row) for name, row in found if row in ("xla", "pallas-interpret")]
    return [(name, row) for name, row in found if not row.endswith("interpret")]
