"""All differences between a model and a checkpoint come in one error."""

import numpy as np
import pytest

from checkpoints import CheckpointError, TensorInfo, TensorRecipe, check_recipes, whole

F32 = np.dtype(np.float32)


def test_everything_in_one_error() -> None:
    recipes = {"p": whole("a", (2, 3)), "q": whole("b", (4,)), "r": whole("c", (5, 5)), "s": whole("c", (5, 6))}
    available = {"a": TensorInfo((2, 3), F32), "c": TensorInfo((5, 5), F32), "x": TensorInfo((1,), F32), "rope.0": None}
    with pytest.raises(CheckpointError) as caught:
        check_recipes(available, recipes, ignored=[r"rope\.\d"])
    assert str(caught.value) == (
        "the checkpoint's tensors do not match the model: 1 missing, 1 unexpected, 1 of wrong shape\n"
        "  missing: b [4]\n"
        "  unexpected: x\n"
        "  of wrong shape: c has shape [5, 5], expected [5, 6]"
    )


def test_ignored_patterns_match_whole_names() -> None:
    with pytest.raises(CheckpointError, match="1 unexpected\n  unexpected: rope.0.more"):
        check_recipes({"rope.0.more": None}, {}, ignored=[r"rope\.\d"])


def test_unknown_shapes_pass() -> None:
    check_recipes({"a": None}, {"p": whole("a", (2, 3))})


def test_long_lists_are_cut() -> None:
    recipes = {f"p{number}": whole(f"t{number}", (1,)) for number in range(50)}
    with pytest.raises(CheckpointError, match=r"50 missing\n  missing: t0 \[1\], .*t19 \[1\] and 30 more$"):
        check_recipes({}, recipes)


def test_a_tensor_used_twice_and_a_recipe_of_zeros() -> None:
    recipes = {"embed": whole("e", (8, 2)), "head": whole("e", (8, 2)), "padding": TensorRecipe((3, 3), (), ())}
    check_recipes({"e": TensorInfo((8, 2), F32)}, recipes)
