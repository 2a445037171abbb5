"""Models whose layers all have a sliding window: bounded pages, the same tokens, prefix caching of what is seen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, MemoryPlanError, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.build import plan_engine
from jaxserve.engine.context_pages import ContextPages
from jaxserve.engine.kv_window import KVWindow, longest_window
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.sequence import Sequence
from jaxserve.models.loading import load_model
from pallas_kernels.native_library import unavailable
from tests.random_checkpoint import write_checkpoint

WINDOW, PAGE_SIZE, CHUNK, MAX_LENGTH = 12, 8, 16, 128
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LENGTH,
    "sliding_window": WINDOW,
    "eos_token_id": None,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": CHUNK,
    "block_size": PAGE_SIZE,
    "compilation_cache_dir": "",
}
REQUEST_PAGES = (WINDOW + CHUNK + 2 - 2) // PAGE_SIZE + 2

needs_native = pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windowed")
    write_checkpoint(directory, CONFIG, seed=4)
    return directory


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
        logits = np.asarray(model(np.array([text + tokens], np.int32))[0])
        assert tokens == logits[len(text) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("kernels", ["xla", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("num_pages", [REQUEST_PAGES, 3 * REQUEST_PAGES])
def test_pages_of_the_window_are_enough(checkpoint: Path, num_pages: int, kernels: str) -> None:
    """Contexts of up to 120 tokens in pages of a third of that, one request after the other or all at once."""
    assert num_pages * PAGE_SIZE < 4 * MAX_LENGTH
    settings = SETTINGS | {"num_gpu_blocks_override": num_pages, "kernels": kernels}
    with LLM(str(checkpoint), **settings) as llm:
        found = generated(llm, prompts(), 30)
        assert_greedy(checkpoint, prompts(), found)
        again = [text + tokens[:9] for text, tokens in zip(prompts(), found, strict=True)]
        assert generated(llm, again, 21) == [tokens[9:] for tokens in found], "from cached pages"


def test_a_window_bounds_what_a_request_needs(checkpoint: Path) -> None:
    plan = plan_engine(EngineConfig(model=str(checkpoint), **SETTINGS))
    assert plan.needs.request_pages == REQUEST_PAGES < plan.needs.table_pages == MAX_LENGTH // PAGE_SIZE
    assert plan.programs[0].num_pages == 3 * REQUEST_PAGES, "never more than all sequences can use"
    small: dict[str, Any] = SETTINGS | {"num_gpu_blocks_override": REQUEST_PAGES - 1}
    with pytest.raises(MemoryPlanError, match=f"needs {REQUEST_PAGES} KV pages"):
        plan_engine(EngineConfig(model=str(checkpoint), **small))


def test_the_ledger_says_what_a_request_holds(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        text = str(llm.ledger)
    assert f"Sliding window: a request holds pages of {REQUEST_PAGES * PAGE_SIZE} tokens at most" in text
    assert "Maximum concurrency for 128 tokens per request: 3.00x" in text


def test_a_layer_without_a_window_needs_every_page(checkpoint: Path, tmp_path: Path) -> None:
    assert longest_window([7, 12, 7]) == 12
    assert longest_window([7, None]) is None
    mixed = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    plan = plan_engine(EngineConfig(model=str(tmp_path), **SETTINGS))
    assert plan.needs.window is None and plan.needs.request_pages == plan.needs.table_pages


def taken(pages: ContextPages, text: list[int], name: str) -> Sequence:
    """A sequence with pages for its text."""
    sequence = Sequence(name, text, len(text), len(text) + 50, reads_cache=True)
    assert pages.take(sequence) is not None
    return sequence


def compute(pages: ContextPages, sequence: Sequence) -> None:
    """Its tokens in chunks, without a device."""
    while sequence.num_computed < len(sequence.token_ids):
        end, _ = pages.reach(sequence, min(sequence.num_computed + 4, len(sequence.token_ids)))
        sequence.num_computed = end
        pages.register(sequence, end)


def test_a_hit_needs_the_pages_of_the_window_alone() -> None:
    allocator = PageAllocator(12, 4)
    window = KVWindow(6, 4, 4)
    pages = ContextPages(allocator, window)
    text = list(range(30))
    first = taken(pages, text, "first")
    compute(pages, first)
    assert len(first.pages) == 8 and len(first.pages) - first.num_released_pages <= window.max_pages
    pages.release(first)
    allocator.cache.settle()
    reused = allocator.allocate(12 - 3)  # the pages that were used longest ago: those of the text's beginning
    assert reused is not None
    second = taken(pages, [*text, 99], "second")
    assert second.num_cached_tokens >= 28
    assert second.num_released_pages == 5, "tokens 22 to 27 are all that token 28 sees"
    assert set(second.pages[:5]) == {second.pages[5]}


def test_a_gap_within_the_window_is_no_hit() -> None:
    allocator = PageAllocator(12, 4)
    pages = ContextPages(allocator, KVWindow(6, 4, 4))
    text = list(range(30))
    first = taken(pages, text, "first")
    compute(pages, first)
    held = first.pages[5]
    pages.release(first)
    allocator.cache.settle()
    allocator.cache.forget(held)  # tokens 20 to 23
    second = taken(pages, [*text, 99], "second")
    assert second.num_cached_tokens < 24


def test_a_window_of_one_token() -> None:
    window = KVWindow(1, 4, 4)
    assert [window.first_page(position) for position in (0, 3, 4, 9)] == [0, 0, 1, 2]
    allocator = PageAllocator(window.max_pages, 4)
    pages = ContextPages(allocator, window)
    sequence = taken(pages, list(range(40)), "one")
    compute(pages, sequence)
    assert len(sequence.pages) == 10
    pages.release(sequence)
    assert allocator.num_free == allocator.num_pages
