"""Compares the tensors that a model needs with those of a checkpoint, and reports every difference in one error."""

import re
from collections.abc import Mapping, Sequence

from checkpoints.errors import CheckpointError
from checkpoints.recipe import TensorRecipe
from checkpoints.tensor_info import TensorInfo

MAX_LISTED = 20


def check_recipes(
    available: Mapping[str, TensorInfo | None], recipes: Mapping[str, TensorRecipe], ignored: Sequence[str] = ()
) -> None:
    """Check that a checkpoint has exactly the tensors that the recipes read, in the expected shapes.

    Args:
        available: the checkpoint's tensors; None when only the name is known (from an index file).
        recipes: by parameter name.
        ignored: regular expressions; unused tensors whose full name matches one are allowed.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape; lists at most 20 of each kind and the
            total.
    """
    needed = {source: shape for recipe in recipes.values() for source, shape in recipe.sources}
    missing = [f"{name} {list(shape)}" for name, shape in needed.items() if name not in available]
    patterns = [re.compile(pattern) for pattern in ignored]
    unexpected = [
        name for name in available if name not in needed and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of wrong shape": _wrong_shapes(available, recipes)}
    found = [(kind, names) for kind, names in problems.items() if names]
    if found:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in found)
        lines = "".join(f"\n  {kind}: {_listed(names)}" for kind, names in found)
        raise CheckpointError(f"the checkpoint's tensors do not match the model: {counts}{lines}")


def _wrong_shapes(available: Mapping[str, TensorInfo | None], recipes: Mapping[str, TensorRecipe]) -> list[str]:
    wrong: dict[str, None] = {}
    for recipe in recipes.values():
        for name, shape in recipe.sources:
            info = available.get(name)
            if info is not None and info.shape != shape:
                wrong[f"{name} has shape {list(info.shape)}, expected {list(shape)}"] = None
    return list(wrong)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"
