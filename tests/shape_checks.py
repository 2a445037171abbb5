"""Checks types of arguments and results, and shapes of arrays, while tests run."""

from pathlib import Path

from jaxtyping import install_import_hook

PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "checkpoints")


def check_shapes(repository: Path) -> None:
    """Instrument modules that name shapes of arrays and are imported from now on.

    jaxtyping's wrapper takes about 50 µs per call, and doubled the time of the tests where every function had it.
    Pyright checks the types in all modules.
    """
    paths = (path for package in PACKAGES for path in (repository / package).rglob("*.py"))
    shaped = [path.relative_to(repository) for path in paths if "from jaxtyping import" in path.read_text()]
    install_import_hook([".".join(path.with_suffix("").parts) for path in shaped], "beartype.beartype")
