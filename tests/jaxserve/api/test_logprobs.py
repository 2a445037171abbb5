"""FlatLogprobs reads like a list with a dict for each position."""

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import FlatLogprobs, Logprob

POSITION = st.none() | st.dictionaries(
    st.integers(0, 9),
    st.builds(Logprob, st.floats(-9, 0), st.none() | st.integers(1, 9), st.none() | st.text(max_size=2)),
    max_size=4,
)


@given(st.lists(POSITION, max_size=6), st.slices(6))
def test_it_reads_like_a_list_of_dicts(positions: list[dict[int, Logprob] | None], selected: slice) -> None:
    plain = [position or {} for position in positions]
    flat = FlatLogprobs.of(positions)
    assert list(flat) == plain
    assert [flat[index] for index in range(-len(plain), len(plain))] == plain + plain
    assert list(flat[selected]) == plain[selected]
    assert flat[selected] == FlatLogprobs.of(positions[selected])
    assert list(reversed(flat)) == plain[::-1]
    assert pickle.loads(pickle.dumps(flat)) == flat


def test_columns() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    flat.append({7: Logprob(-0.5, 1, "a"), 3: Logprob(-1.5)})
    flat.append_fast([5], [-2.0], [4], ["b"])
    assert flat == FlatLogprobs(
        start_indices=[0, 0, 2],
        end_indices=[0, 2, 3],
        token_ids=[7, 3, 5],
        logprobs=[-0.5, -1.5, -2.0],
        ranks=[1, None, 4],
        decoded_tokens=["a", None, "b"],
    )
    assert len(flat) == 3
    assert flat[2] == {5: Logprob(-2.0, 4, "b")}
    assert flat[0] == {}
    assert isinstance(flat, Sequence)


def test_a_slice_is_a_copy_that_grows_alone() -> None:
    flat = FlatLogprobs.of([{1: Logprob(-1.0)}, {2: Logprob(-2.0)}])
    part = flat[1:]
    part.append({3: Logprob(-3.0)})
    assert list(part) == [{2: Logprob(-2.0)}, {3: Logprob(-3.0)}]
    assert len(flat) == 2


def test_outside_the_positions() -> None:
    with pytest.raises(IndexError, match="out of range"):
        _ = FlatLogprobs()[0]
    with pytest.raises(IndexError, match="out of range"):
        _ = FlatLogprobs.of([None])[-2]
