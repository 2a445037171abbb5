"""A model and a draft head for it: answers of the model alone, an engine with both, and the drafts on its device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.api.metric_types import Counter
from jaxserve.device.runner import LocalRunner
from jaxserve.device.step_batch import LatestTokens
from jaxserve.layers.attention import AttentionSettings, choose_attention
from jaxserve.layers.kv_layout import attended
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.draft_head import DraftHead
from pallas_kernels import AttentionBatch

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 80,
    "compilation_cache_dir": "",
}
VOCAB, LONGEST, NUM_DRAFTS, MASK = 360, 64, 3, 17
PROMPTS = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (8, 10, 16, 25)]
"""More than a step holds, so that one is computed in chunks; some end with a page that others go on from."""
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


class Pair:
    """A model with a head, the answers of the model alone, and an engine with the head.

    Args:
        method: Method of speculative decoding.
        model: Directory of the model.
        head: Directory of the head.
        is_named: Whether the settings name the head; if not, it is in the model's directory.
        start: What the engine with the head is asked to run.
    """

    def __init__(self, method: str, model: Path, head: Path, *, is_named: bool = True, start: Path):
        self.method, self.model, self.head = method, model, head
        with LLM(str(model), **SETTINGS) as alone:
            self.greedy, self.sampled = (self.answers(alone, **options) for options in ({"temperature": 0.0}, SAMPLED))
        named = {"model": str(head)} if is_named else {}
        number = {"num_speculative_tokens": NUM_DRAFTS, "enable_adaptive_verification": False}
        self.speculation: dict[str, Any] = {"method": method, **number, **named}
        self.llm = LLM(str(start), **SETTINGS, speculative_config=self.speculation)

    @staticmethod
    def answers(llm: LLM, **options: Any) -> list[list[int]]:
        """Tokens of each prompt's completion."""
        params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params, use_tqdm=False)]

    def counts(self) -> np.ndarray:
        """Drafts and accepted drafts so far."""
        found = {each.name: each for each in self.llm.get_metrics()}
        names = ("num_draft_tokens", "num_accepted_tokens")
        counters = [found[f"jaxserve:spec_decode_{name}"] for name in names]
        return np.array([each.value for each in counters if isinstance(each, Counter)])

    def num_right_drafts(self, num_tokens: int, drafts_after: Callable[[list[int]], list[int]]) -> int:
        """Answer until the token after ``num_tokens``; return how many slots have the drafts after their text."""
        stops = [answer[num_tokens] for answer in self.greedy]
        params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[s]) for s in stops]
        self.llm.generate(PROMPTS, params, use_tqdm=False)
        latest = latest_tokens(self.llm)
        assert latest.drafts is not None
        texts = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in zip(PROMPTS, self.greedy, strict=True)]
        found = 0
        for slot, position in enumerate(np.asarray(latest.positions)):
            begins = [text[: position + 1] for text in texts if text[position] == latest.token_ids[slot]]
            found += np.asarray(latest.drafts[slot]).tolist() in [drafts_after(begin) for begin in begins]
        return found


def latest_tokens(llm: LLM) -> LatestTokens:
    """What the device has of each slot."""
    runner = llm.engine.replicas[0].runner
    assert isinstance(runner, LocalRunner)
    return runner._stages[-1].state.latest


def row_of(tokens: np.ndarray) -> TokenBatch:
    """One sequence of ``LONGEST`` tokens in one page."""
    positions, zero = jnp.arange(LONGEST), jnp.zeros(1, jnp.int32)
    length, pages = jnp.array([LONGEST]), jnp.zeros(LONGEST, jnp.int32)
    row = AttentionBatch(zero[None], length, zero, length, jnp.int32(1), pages, positions, jnp.int32(0))
    return TokenBatch(jnp.asarray(tokens), positions, jnp.full(LONGEST, LONGEST), (row,))


def padded(tokens: list[int]) -> np.ndarray:
    """Tokens and zeros after them."""
    found = np.zeros(LONGEST, np.int32)
    found[: len(tokens)] = tokens
    return found


def pools_of(module: CausalLM | DraftHead) -> tuple[list[Any], AttentionSettings]:
    """Empty pools, and settings of attention."""
    seen = attended(module.kv_specs)
    kernel = choose_attention(jax.devices()[0], "float32", "xla", seen[0].operation, page_size=LONGEST)
    specs = (kernel.implementation.pool_specs(1, LONGEST, spec.num_kv_heads, spec.head_dim) for spec in seen)
    pools = [tuple(jnp.zeros(array.shape) for array in arrays) for arrays in specs]
    return pools, AttentionSettings(kernel.implementation, LONGEST, decode_only=False)
