"""Which implementations the check runs."""

from pallas_kernels.registry import OPERATIONS

H200 = ("gpu", "NVIDIA H200")


def rows(is_tiny: bool) -> list[tuple[str, str]]:
    """List operations and implementations: those for a GPU, or those that run fast enough on a CPU to try the check.

    Paged attention comes first: the engine cannot do without it, and it is the most likely to be wrong. What is plain
    XLA comes last.
    """
    names = sorted(OPERATIONS, key=lambda name: name != "paged_attention")
    found = sorted(((name, row) for name in names for row in OPERATIONS[name]), key=lambda each: each[1] == "xla")
    if is_tiny:
        return [(name, row) for name, row in found if row in ("native", "xla", "pallas-interpret")]
    found = [(name, row) for name, row in found if row != "native" and not row.endswith("interpret")]
    with_kernels = {name for name, row in found if row != "xla"}  # what XLA alone multiplies is in gemms
    return [(name, row) for name, row in found if name in with_kernels]
