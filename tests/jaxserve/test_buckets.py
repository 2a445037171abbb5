"""Batch shapes: every step has one, small decode steps exactly, and there are few of them."""

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.device.buckets import Buckets
from jaxserve.device.stage import num_programs, step_keys

MAX_PROGRAMS = 40
LIMITS = [(64, 1024), (256, 8192), (1024, 16384)]  # CPU, GPU, large GPU
AWKWARD = [(1, 1), (1, 5), (3, 3), (7, 100), (8, 16), (13, 17), (48, 65), (100, 1000), (256, 2048)]


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), LIMITS + AWKWARD)
def test_every_step_has_a_shape(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, 9)
    announced = set(buckets.shapes())
    assert len(announced) == len(buckets.shapes())
    for num_tokens in range(1, max_num_batched_tokens + 1):
        for decode_only in (False, True):
            if decode_only and num_tokens > max_num_seqs:
                continue
            shape = buckets.shape_for(num_tokens, decode_only)
            assert shape in announced
            assert shape.decode_only == decode_only and shape.table_pages == 9
            assert num_tokens <= shape.num_tokens <= max_num_batched_tokens
            assert shape.num_rows >= min(num_tokens, max_num_seqs), "a row for each token, as far as rows go"
            assert not decode_only or shape.num_rows == shape.num_tokens


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), LIMITS)
def test_small_decode_steps_are_exact(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, 9)
    assert [buckets.shape_for(rows, True).num_rows for rows in (1, 2, 4, 8)] == [1, 2, 4, 8]


def test_no_product_has_one_row_where_that_is_slow() -> None:
    """GPUs, and bfloat16 weights on CPUs: also where only one sequence can run."""
    buckets = Buckets.make(64, 1024, 9, multiple=2)
    assert [buckets.shape_for(rows, True).num_rows for rows in (1, 2, 3, 8)] == [2, 2, 4, 8]
    assert Buckets.make(1, 16, 9, multiple=2).decode_rows == (2,)


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), LIMITS)
def test_at_most_a_third_of_a_prefill_step_is_padding(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, 9)
    for num_tokens in range(64, max_num_batched_tokens + 1):
        padding = buckets.shape_for(num_tokens, False).num_tokens - num_tokens
        assert 3 * padding <= num_tokens + padding


@pytest.mark.parametrize(("limits", "platform"), [(LIMITS[0], "cpu"), (LIMITS[1], "gpu"), (LIMITS[2], "gpu")])
def test_few_programs(limits: tuple[int, int], platform: str) -> None:
    buckets = Buckets.make(*limits, 9, multiple=1 if platform == "cpu" else 2)
    keys = step_keys(buckets, platform)
    assert len(set(keys)) == len(keys) <= num_programs(buckets, platform) <= MAX_PROGRAMS


@pytest.mark.parametrize("num_drafts", [1, 4, 64])
@pytest.mark.parametrize(("limits", "platform"), [(LIMITS[0], "cpu"), (LIMITS[1], "gpu"), (LIMITS[2], "gpu")])
def test_drafts_have_shapes_of_their_own(limits: tuple[int, int], platform: str, num_drafts: int) -> None:
    """As many rows as there can be and their samples, as far as these are bounded; still few programs."""
    multiple = 1 if platform == "cpu" else 2
    buckets = Buckets.make(*limits, 9, multiple, max_samples=1 + num_drafts, max_step_samples=limits[0] + 1)
    most = limits[0] + multiple
    assert buckets.max_step_samples is not None and limits[0] < buckets.max_step_samples <= most
    for num_rows in range(1, limits[0] + 1):
        for num_tokens in {num_rows + 1, min(num_rows * (1 + num_drafts), limits[0] + 1)}:
            shape = buckets.draft_shape_for(num_rows, num_tokens)
            assert shape.has_drafts and shape.num_rows >= num_rows
            assert num_tokens <= shape.num_tokens == shape.sampler.num_samples <= most
    assert buckets.shape_for(limits[1], False).sampler.num_samples <= most
    assert num_programs(buckets, platform) <= MAX_PROGRAMS


def test_programs_of_a_cpu() -> None:
    """A step for each shape, a sampler for each number of rows, and a scorer."""
    buckets = Buckets.make(64, 1024, 9)
    assert step_keys(buckets, "cpu") == [(shape, "any") for shape in buckets.shapes()]
    rows = {*buckets.decode_rows, 64}
    assert num_programs(buckets, "cpu") == len(buckets.decode_rows) + len(buckets.mixed_tokens) + len(rows) + 1


def test_prompts_are_scored_by_one_program() -> None:
    """On accelerators; it holds the largest step, and no other shape computes prompt logprobs."""
    buckets = Buckets.make(7, 100, 9)
    scoring = [key for key in step_keys(buckets, "gpu") if key[0].scores_prompt]
    assert scoring == [(buckets.scoring_shape, "any")]
    shape = buckets.scoring_shape
    assert (shape.num_tokens, shape.num_rows, shape.decode_only) == (100, 7, False)


@pytest.mark.parametrize("multiple", [2, 8])
@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), AWKWARD)
def test_shapes_are_multiples_where_asked(max_num_seqs: int, max_num_batched_tokens: int, multiple: int) -> None:
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, 9, multiple=multiple)
    for shape in buckets.shapes():
        assert shape.num_rows % multiple == shape.num_tokens % multiple == 0
    for num_tokens in range(1, max_num_batched_tokens + 1):
        assert buckets.shape_for(num_tokens, False).num_tokens >= num_tokens
        assert buckets.shape_for(num_tokens, False).num_rows >= min(num_tokens, max_num_seqs)
    for rows in range(1, max_num_seqs + 1):
        assert buckets.shape_for(rows, True).num_rows >= rows


def test_given_sizes_are_the_shapes() -> None:
    """Sorted, without duplicates; a kind that is left out keeps its ladder."""
    default = Buckets.make(64, 1024, 9)
    assert Buckets.make(64, 1024, 9, compile_sizes={}) == default
    decode = Buckets.make(64, 1024, 9, compile_sizes={"decode": [16, 2, 16]})
    assert (decode.decode_rows, decode.mixed_tokens) == ((2, 16), default.mixed_tokens)
    mixed = Buckets.make(64, 1024, 9, compile_sizes={"mixed": [1024, 1, 1024]})
    assert (mixed.decode_rows, mixed.mixed_tokens) == (default.decode_rows, (1, 1024))
    assert mixed.scoring_shape == default.scoring_shape
    both = Buckets.make(64, 1024, 9, compile_sizes={"decode": [64], "mixed": [1024]})
    assert [(shape.num_tokens, shape.num_rows) for shape in both.shapes()] == [(64, 64), (1024, 64)]
    assert (num_programs(both, "cpu"), num_programs(both, "gpu")) == (4, 4)


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("sizes", [{"decode": [3]}, {"mixed": [5, 13, 100]}, {"decode": [1, 4], "mixed": [100]}])
def test_every_step_has_a_shape_of_the_given_sizes(sizes: dict[str, list[int]], multiple: int) -> None:
    """The smallest that holds it; decode steps with more rows than any decode shape take a mixed one."""
    buckets = Buckets.make(13, 100, 9, multiple, sizes)
    announced = set(buckets.shapes())
    for shape in announced:
        assert shape.num_rows % multiple == shape.num_tokens % multiple == 0
    for num_tokens in range(1, 101):
        for decode_only in (False, True)[: 2 if num_tokens <= 13 else 1]:
            shape = buckets.shape_for(num_tokens, decode_only)
            assert shape in announced and not shape.scores_prompt
            assert shape.decode_only == (decode_only and num_tokens <= buckets.decode_rows[-1])
            assert shape.num_tokens >= num_tokens and shape.num_rows >= min(num_tokens, 13)
            of_kind = buckets.decode_rows if shape.decode_only else buckets.mixed_tokens
            assert shape.num_tokens == min(size for size in of_kind if size >= num_tokens)


def test_given_sizes_are_rounded_up() -> None:
    """The limits too, so that 97 tokens hold a step of 100; a size larger than its limit is refused as given."""
    buckets = Buckets.make(7, 100, 9, 8, {"decode": [1, 5, 7], "mixed": [97, 20]})
    assert (buckets.decode_rows, buckets.mixed_tokens) == ((8,), (24, 104))
    with pytest.raises(ConfigError, match=r"compile_sizes\.decode: expected sizes up to max_num_seqs=7 .*, got 8"):
        Buckets.make(7, 100, 9, 8, {"decode": [8]})
    with pytest.raises(ConfigError, match=r"compile_sizes\.mixed: expected .* max_num_batched_tokens=100 .*, got 104"):
        Buckets.make(7, 100, 9, 8, {"mixed": [104]})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"decode": [2, 65]},
            r"compile_sizes\.decode: expected sizes up to max_num_seqs=64 \(.*device\), got 65.*raise max_num_seqs$",
        ),
        (
            {"mixed": [2048, 1024]},
            r"compile_sizes\.mixed: expected sizes up to max_num_batched_tokens=1024 \(.*\), got 2048, .*raise max_num",
        ),
        (
            {"mixed": [512, 64]},
            r"compile_sizes\.mixed: the largest size must hold a step of max_num_batched_tokens=1024 \(.*\), got "
            r"\[64, 512\]; add 1024 to the list or lower max_num_batched_tokens to 512$",
        ),
    ],
)
def test_sizes_that_do_not_go_with_the_limits(sizes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Buckets.make(64, 1024, 9, compile_sizes=sizes)
