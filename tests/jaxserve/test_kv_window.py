"""Models with sliding windows in all layers or some: bounded pages, the same tokens, prefix caching of what is seen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, MemoryPlanError, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import plan_engine
from jaxserve.models.loading import load_model
from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator
from jaxserve.scheduling.sequence import Sequence
from pallas_kernels.native_library import unavailable
from tests.random_checkpoint import LLAMA, write_checkpoint
from tests.sequences import make_sequence

WINDOW, PAGE_SIZE, CHUNK, MAX_LENGTH = 12, 8, 16, 128
CONFIG = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": MAX_LENGTH,
    "sliding_window": WINDOW,
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": CHUNK,
    "block_size": PAGE_SIZE,
    "compilation_cache_dir": "",
}
MIXED: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 5,
    "use_sliding_window": True,
    "max_window_layers": 3,
}
"""Three layers that see everything, then two that do not: five page tables over one pool."""
WINDOW_PAGES = (WINDOW + CHUNK + 2 - 2) // PAGE_SIZE + 2
LONGEST_PAGES = MAX_LENGTH // PAGE_SIZE
REQUEST_PAGES = {"windowed": WINDOW_PAGES, "mixed": 3 * LONGEST_PAGES + 2 * WINDOW_PAGES}

needs_native = pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in REQUEST_PAGES}
    write_checkpoint(directories["windowed"], CONFIG, seed=4)
    write_checkpoint(directories["mixed"], MIXED, seed=4)
    return directories


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 51, length).tolist() for length in (90, 3, 40, 61)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)


def generated(llm: LLM, texts: list[list[int]], num_tokens: int) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], greedy(num_tokens))
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_greedy(checkpoint: Path, texts: list[list[int]], found: list[list[int]]) -> None:
    """Against the module on its own, which keeps every token."""
    model = load_model(checkpoint)
    for text, tokens in zip(texts, found, strict=True):
        whole = text + tokens
        padded = [*whole, *[0] * (MAX_LENGTH - len(whole))]  # of one length, for which the layers are compiled once
        logits = np.asarray(model(np.array([padded], np.int32))[0])
        assert tokens == logits[len(text) - 1 : len(whole) - 1].argmax(1).tolist()


@pytest.mark.parametrize("kernels", ["xla", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("num_requests", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["windowed", "mixed"])
def test_pages_of_the_window_are_enough(
    checkpoints: dict[str, Path], name: str, num_requests: int, kernels: str
) -> None:
    """Contexts of up to 120 tokens in fewer pages than they are long, one request after the other or all at once."""
    checkpoint, settings = checkpoints[name], SETTINGS | {"kernels": kernels}
    settings["num_gpu_blocks_override"] = num_requests * REQUEST_PAGES[name]
    with LLM(str(checkpoint), **settings) as llm:
        found = generated(llm, prompts(), 30)
        assert_greedy(checkpoint, prompts(), found)
        again = [text + tokens[:9] for text, tokens in zip(prompts(), found, strict=True)]
        assert generated(llm, again, 21) == [tokens[9:] for tokens in found], "from cached pages"


def test_layers_are_split_and_have_several_page_tables(checkpoints: dict[str, Path]) -> None:
    with LLM(str(checkpoints["mixed"]), **SETTINGS, tensor_parallel_size=2) as llm:
        found = generated(llm, prompts(), 20)
    assert_greedy(checkpoints["mixed"], prompts(), found)


def test_batch_mates_change_nothing_where_there_are_several_page_tables(checkpoints: dict[str, Path]) -> None:
    """Also not their prefixes, which are cached page by page in each table."""
    settings = SETTINGS | {"deterministic": True, "kernels": "xla", "enable_prefix_caching": True}
    with LLM(str(checkpoints["mixed"]), **settings) as llm:
        together = generated(llm, prompts() + [prompts()[0][:70]] * 3, 12)
    with LLM(str(checkpoints["mixed"]), **settings | {"enable_prefix_caching": False}) as llm:
        alone = [generated(llm, [text], 12)[0] for text in [*prompts(), prompts()[0][:70]]]
    assert together == alone + [alone[-1]] * 2


@pytest.mark.parametrize("name", ["windowed", "mixed"])
def test_a_window_bounds_what_a_request_needs(checkpoints: dict[str, Path], name: str) -> None:
    model, num_pages = str(checkpoints[name]), REQUEST_PAGES[name]
    plan = plan_engine(EngineConfig(model=model, **SETTINGS))
    assert plan.needs.table_pages == LONGEST_PAGES
    assert plan.needs.request_pages == num_pages < len(plan.needs.windows) * LONGEST_PAGES
    assert plan.models[0].num_pages == 3 * num_pages, "never more than all sequences can use"
    small: dict[str, Any] = SETTINGS | {"num_gpu_blocks_override": num_pages - 1}
    with pytest.raises(MemoryPlanError, match=f"needs {num_pages} KV pages"):
        plan_engine(EngineConfig(model=model, **small))


def test_the_ledger_says_what_a_request_holds(checkpoints: dict[str, Path]) -> None:
    with LLM(str(checkpoints["windowed"]), **SETTINGS) as llm:
        text = str(llm.ledger)
    assert f"Sliding window: a request holds pages for at most {WINDOW_PAGES * PAGE_SIZE} tokens" in text
    assert "Maximum concurrency for 128 tokens per request: 3.00x" in text


def test_the_ledger_of_layers_with_and_without_a_window(checkpoints: dict[str, Path]) -> None:
    with LLM(str(checkpoints["mixed"]), **SETTINGS) as llm:
        text = str(llm.ledger)
    mean = REQUEST_PAGES["mixed"] * PAGE_SIZE // 5
    assert f"Sliding window: a request holds pages for at most {mean} tokens (mean over layers)" in text
    assert f"CPU KV cache size: {3 * REQUEST_PAGES['mixed'] // 5 * PAGE_SIZE:,} tokens" in text
    assert "Maximum concurrency for 128 tokens per request: 3.00x" in text


def test_a_window_that_no_context_fills_is_none(checkpoints: dict[str, Path]) -> None:
    plan = plan_engine(EngineConfig(model=str(checkpoints["mixed"]), max_model_len=WINDOW, **SETTINGS))
    assert plan.needs.windows == (None,) and sum(plan.models[0].kv_layout.counts) == 5


def test_the_longest_context_that_fits(checkpoints: dict[str, Path]) -> None:
    """``max_model_len=-1``, with pages for a part of the longest context."""
    settings: dict[str, Any] = SETTINGS | {"max_model_len": -1}
    settings["num_gpu_blocks_override"] = 3 * 9 + 2 * WINDOW_PAGES + 2
    plan = plan_engine(EngineConfig(model=str(checkpoints["mixed"]), **settings))
    assert plan.max_model_len == 9 * PAGE_SIZE


def taken(pages: ContextPages, text: list[int], name: str) -> Sequence:
    """A sequence with pages for its text."""
    sequence = make_sequence(name, text, len(text), len(text) + 50, reads_cache=True)
    assert pages.allocate(sequence) is not None
    return sequence


def compute(pages: ContextPages, sequence: Sequence) -> None:
    """Its tokens in chunks, without a device."""
    while sequence.num_computed < len(sequence.token_ids):
        end = pages.grow_to(sequence, min(sequence.num_computed + 4, len(sequence.token_ids)))
        sequence.num_computed = end
        pages.cache.register(sequence, end)


def test_a_hit_needs_the_pages_of_the_window_alone() -> None:
    allocator = PageAllocator(12, 4)
    window = KVWindow(6, 4, 4)
    pages = ContextPages(allocator, [window])
    text = list(range(30))
    first = taken(pages, text, "first")
    compute(pages, first)
    assert (
        len(first.tables[0].pages) == 8
        and len(first.tables[0].pages) - first.tables[0].num_released <= window.max_pages
    )
    pages.release(first)
    allocator.cache.settle()
    reused = allocator.allocate(12 - 3)  # the pages that were used longest ago: those of the text's beginning
    assert reused is not None
    second = taken(pages, [*text, 99], "second")
    assert second.num_cached_tokens >= 28
    assert second.tables[0].num_released == 5, "tokens 22 to 27 are all that token 28 sees"
    assert set(second.tables[0].pages[:5]) == {second.tables[0].pages[5]}


def test_a_gap_within_the_window_is_no_hit() -> None:
    allocator = PageAllocator(12, 4)
    pages = ContextPages(allocator, [KVWindow(6, 4, 4)])
    text = list(range(30))
    first = taken(pages, text, "first")
    compute(pages, first)
    held = first.tables[0].pages[5]
    pages.release(first)
    allocator.cache.settle()
    allocator.cache.forget(held)  # tokens 20 to 23
    second = taken(pages, [*text, 99], "second")
    assert second.num_cached_tokens < 24


def test_a_window_of_one_token() -> None:
    window = KVWindow(1, 4, 4)
    assert [window.first_page(position) for position in (0, 3, 4, 9)] == [0, 0, 1, 2]
    allocator = PageAllocator(window.max_pages, 4)
    pages = ContextPages(allocator, [window])
    sequence = taken(pages, list(range(40)), "one")
    compute(pages, sequence)
    assert len(sequence.tables[0].pages) == 10
    pages.release(sequence)
    assert allocator.num_free == allocator.num_pages
