"""Recipes are checked when they are made."""

import pytest

from checkpoints import Piece, TensorRecipe, whole


def test_whole() -> None:
    recipe = whole("w", [3, 4])
    assert recipe == TensorRecipe((3, 4), (Piece("w", (0, 0), (0, 0), (3, 4)),), (("w", (3, 4)),))
    assert recipe.num_elements == 12
    assert whole("scalar", ()).num_elements == 1


def test_a_piece_outside_its_source() -> None:
    with pytest.raises(ValueError, match=r"reaches outside its source of shape \[4, 4\]"):
        TensorRecipe((4, 4), (Piece("w", (2, 0), (0, 0), (3, 4)),), (("w", (4, 4)),))
    with pytest.raises(ValueError, match="reaches outside its source"):
        TensorRecipe((4, 4), (Piece("w", (-1, 0), (0, 0), (3, 4)),), (("w", (4, 4)),))


def test_a_piece_outside_the_array() -> None:
    with pytest.raises(ValueError, match=r"reaches outside the array of shape \[2, 4\]"):
        TensorRecipe((2, 4), (Piece("w", (0, 0), (0, 0), (3, 4)),), (("w", (4, 4)),))


def test_a_piece_of_another_rank() -> None:
    with pytest.raises(ValueError, match="reaches outside its source"):
        TensorRecipe((4,), (Piece("w", (0,), (0,), (4,)),), (("w", (4, 4)),))
    with pytest.raises(ValueError, match="reaches outside the array"):
        TensorRecipe((4,), (Piece("w", (0, 0), (0, 0), (4, 4)),), (("w", (4, 4)),))


def test_a_piece_of_one_matrix_of_a_stacked_tensor() -> None:
    TensorRecipe((3, 4), (Piece("w", (1, 2, 0), (0, 0), (3, 4)),), (("w", (2, 5, 4)),))
    with pytest.raises(ValueError, match=r"reaches outside its source of shape \[2, 5, 4\]"):
        TensorRecipe((3, 4), (Piece("w", (2, 2, 0), (0, 0), (3, 4)),), (("w", (2, 5, 4)),))


def test_a_transposed_piece() -> None:
    assert whole("w", (3, 4), is_transposed=True).sources == (("w", (4, 3)),)
    TensorRecipe((3, 4), (Piece("w", (1, 0, 2), (0, 0), (3, 4), True),), (("w", (2, 4, 5)),))
    with pytest.raises(ValueError, match=r"reaches outside its source of shape \[3, 4\]"):
        TensorRecipe((3, 4), (Piece("w", (0, 0), (0, 0), (3, 4), True),), (("w", (3, 4)),))
    with pytest.raises(ValueError, match="is transposed, which needs two dimensions, but has 1"):
        TensorRecipe((4,), (Piece("w", (0,), (0,), (4,), True),), (("w", (4,)),))


def test_other_names_of_the_sources() -> None:
    assert whole("x.w", (3, 4), True).renamed(lambda name: name.removeprefix("x.")) == whole("w", (3, 4), True)


def test_a_piece_of_an_unlisted_tensor() -> None:
    with pytest.raises(ValueError, match=r"its source is not in sources \['w'\]"):
        TensorRecipe((4,), (Piece("v", (0,), (0,), (4,)),), (("w", (4,)),))
