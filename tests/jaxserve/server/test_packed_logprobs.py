"""Log-probabilities as arrays: what is read is what was packed, and long ones are read on a thread."""

import math

import pytest

from jaxserve.api.logprobs import FlatLogprobs, Logprob
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.frames import HEADER
from jaxserve.server.wire import Outputs, pack, unpack

POSITIONS = [
    {7: Logprob(-0.5, 2, "é", b"\xc3", 0), 9: Logprob(-math.inf, 1, "")},
    {3: Logprob(-0.25, None, None, b"", 4)},
    {8: Logprob(math.nan, 5, "\n\0", None, 6)},
]
PROMPT = [None, *POSITIONS]


def same(one: Logprob, other: Logprob) -> bool:
    """Whether all fields are equal, those included that comparison leaves out."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in Logprob.__slots__]
    return all(a == b or (a != a and b != b) for a, b in pairs)


def assert_same(found: object, expected: object) -> None:
    assert isinstance(found, PackedLogprobs) and isinstance(expected, list)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other or {})
        assert all(same(one[token], other[token]) for token in one)


@pytest.mark.parametrize("is_flat", [False, True])
def test_what_is_packed_is_read(is_flat: bool) -> None:
    packed = PackedLogprobs.of(FlatLogprobs.of(POSITIONS) if is_flat else POSITIONS)
    assert_same(packed, POSITIONS)
    assert packed.num_entries == 4
    assert list(packed[1]) == [3] and len(packed[1:]) == 2


def test_deltas_are_joined() -> None:
    joined = PackedLogprobs.of(POSITIONS[:1])
    joined.extend(PackedLogprobs.of(POSITIONS[1:]))
    assert_same(joined, POSITIONS)
    assert joined == PackedLogprobs.of(POSITIONS) or math.isnan(joined[2][8].logprob)


def test_they_cross_as_arrays() -> None:
    completion = CompletionOutput(0, "x", [7, 3, 8], -1.0, POSITIONS)
    output = RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=[1] * 4,
        outputs=[completion],
        finished=True,
        prompt_logprobs=PROMPT,
    )
    found = unpack(pack(Outputs([(1, output)]), 1 << 20)[HEADER.size :]).outputs[0][1]
    assert_same(found.prompt_logprobs, PROMPT)
    assert_same(found.outputs[0].logprobs, POSITIONS)
    assert not found.prompt_logprobs[0]
    plain = CompletionOutput(0, "x", [7])
    output.outputs, output.prompt_logprobs = [plain], None
    found = unpack(pack(Outputs([(1, output)]), 1 << 20)[HEADER.size :]).outputs[0][1]
    assert found.outputs == [plain] and found.prompt_logprobs is None
