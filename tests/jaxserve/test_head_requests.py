"""Requests with draft heads, end to end: the answers of the model alone, and drafts that depend on the tokens alone."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.api.metric_types import Counter
from jaxserve.device.head_states import HeadStates
from jaxserve.device.runner import LocalRunner
from jaxserve.device.step_batch import LatestTokens
from jaxserve.layers.attention import AttentionSettings, choose_attention
from jaxserve.layers.kv_layout import attended
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.draft_head import DraftHead
from jaxserve.models.loading import load_model
from jaxserve.scheduling.draft_passes import DraftPasses
from pallas_kernels import AttentionBatch
from tests.draft_heads import HEAD, as_speculators, load_head, spoil_padding, write_eagle, write_eagle3, write_mtp
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint, write_tokenizer

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


def foreseeable(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model whose next token depends on the latest one above all, and an MTP layer that looks at it alike."""
    layer, size = "model.layers.2", 16
    weak = {name: tensor / 8 for name, tensor in tensors.items() if "o_proj" in name or "down_proj" in name}
    projection = np.concatenate([np.eye(size), tensors[f"{layer}.eh_proj.weight"][:, size:] / 8], 1)
    norms = {f"{layer}.enorm.weight": np.ones(size), f"{layer}.shared_head.norm.weight": tensors["model.norm.weight"]}
    changed = {**weak, **norms, f"{layer}.eh_proj.weight": projection}
    return {**tensors, **{name: tensor.astype(np.float32) for name, tensor in changed.items()}}


class Pair:
    """A model with a head, the answers of the model alone, and an engine with the head."""

    def __init__(self, directory: Path, method: str):
        self.method, self.model = method, directory / "model"
        self.model.mkdir()
        if method == "mtp":
            self.head = self.model
            tensors = write_mtp(self.model, {**DEEPSEEK, "vocab_size": VOCAB})
            save_file(foreseeable(tensors), self.model / "model.safetensors")
        else:
            self.head = directory / "head"
            write_checkpoint(self.model, {**LLAMA, "num_hidden_layers": 8, "vocab_size": VOCAB}, 0)
        if method == "eagle":
            write_eagle(self.head, {**HEAD, "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB})
        elif method in ("eagle3", "peagle"):
            named = {"verifier": {"name_or_path": str(self.model)}}
            config = as_speculators({**HEAD, "vocab_size": VOCAB, "draft_vocab_size": 200}, speculators_config=named)
            one_pass = {"speculators_model_type": "peagle", "mask_token_id": MASK} if method == "peagle" else {}
            write_eagle3(self.head, {**config, **one_pass}, mask_size=48 if one_pass else None)
            self.method = "eagle3"
        write_tokenizer(self.model)
        with LLM(str(self.model), **SETTINGS) as alone:
            self.greedy, self.sampled = (self.answers(alone, **options) for options in ({"temperature": 0.0}, SAMPLED))
        named = {} if method == "mtp" else {"model": str(self.head)}
        number = {"num_speculative_tokens": NUM_DRAFTS, "enable_adaptive_verification": False}
        self.speculation = {"method": self.method, **number, **named}
        self.llm = LLM(
            str(self.model if method == "eagle" else self.head), **SETTINGS, speculative_config=self.speculation
        )

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


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("eagle3", "eagle")]


@pytest.fixture(scope="module", params=["mtp", "peagle", *SLOW])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp(request.param), request.param)
    with made.llm:
        yield made


def num_right_drafts(pair: Pair, num_tokens: int) -> int:
    """Answer until the token after ``num_tokens``; return how many slots have the drafts of a pass over their text."""
    target, head = load_model(pair.model), load_head(pair.method, pair.head, pair.model)
    stops = [answer[num_tokens] for answer in pair.greedy]
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[s]) for s in stops]
    pair.llm.generate(PROMPTS, params, use_tqdm=False)
    latest = latest_tokens(pair.llm)
    assert latest.drafts is not None
    texts = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in zip(PROMPTS, pair.greedy, strict=True)]
    found = 0
    for slot, position in enumerate(np.asarray(latest.positions)):
        begins = [text[: position + 1] for text in texts if text[position] == latest.token_ids[slot]]
        expected = [offline_drafts(target, head, begin) for begin in begins]
        found += np.asarray(latest.drafts[slot]).tolist() in expected
    return found


def test_drafts_on_the_device_are_those_of_the_whole_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was rejected, computed in chunks, cached or filled by another row of the same step on the way.

    Also after steps that made none: these leave zeros on the device.
    """
    for num_tokens in (9, 20):
        assert num_right_drafts(pair, num_tokens) == len(PROMPTS)
    found = 0
    for first in range(4):
        made = itertools.cycle([NUM_DRAFTS if i == first else 0 for i in range(4)])
        monkeypatch.setattr(DraftPasses, "choose", lambda *_, made=made: next(made))
        found += num_right_drafts(pair, 20)
    assert found > 0


@pytest.mark.slow
def test_drafts_on_another_mesh_are_those_of_the_whole_text(pair: Pair) -> None:
    """Rows begin after cached pages, whose states have moved."""
    num_right_drafts(pair, 20)
    for mesh in ("tensor=2", "tensor=1"):
        assert pair.llm.reshard(mesh).num_pages > 0
        for num_tokens in (1, 2, 3, 5, 9):
            assert num_right_drafts(pair, num_tokens) == len(PROMPTS)


def test_answers_are_those_without_a_head_and_drafts_the_same_from_the_cache(pair: Pair) -> None:
    """Greedy and sampled; what is cached, and what its pages held before, changes no draft."""
    counts = [pair.counts()]
    for _ in range(2):
        assert pair.answers(pair.llm, temperature=0.0) == pair.greedy
        counts.append(pair.counts())
    assert pair.answers(pair.llm, **SAMPLED) == pair.sampled
    (drafted, accepted), again = counts[1] - counts[0], counts[2] - counts[1]
    assert (drafted, accepted) == tuple(again) and drafted > 200
    assert accepted > 40 or pair.method != "mtp"


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "layout": "sequence_parallel"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "layout": "split_logits"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "layout": "context_parallel"}, marks=pytest.mark.slow),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_on_several_devices_are_those_without_a_head(pair: Pair, mesh: dict[str, Any]) -> None:
    """Also at the end of requests, where the host knows the latest token and the device has the drafts after it."""
    sampled = [{**SAMPLED, "seed": seed} for seed in (5, 15)]
    found = []
    for more in ({}, {"speculative_config": pair.speculation}):
        with LLM(str(pair.model), **SETTINGS, **mesh, **more) as llm:
            found.append([pair.answers(llm, **options) for options in sampled])
    assert found[0] == found[1]


@pytest.mark.slow
def test_what_kernels_leave_in_padding_changes_no_draft(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_padding(monkeypatch)
    model = str(pair.model if pair.method == "eagle" else pair.head)
    with LLM(model, **SETTINGS, speculative_config=pair.speculation) as llm:
        answers = pair.answers(llm, temperature=0.0)
        monkeypatch.setattr(pair, "llm", llm)
        assert answers == pair.greedy
        assert num_right_drafts(pair, 20) == len(PROMPTS)


def latest_tokens(llm: LLM) -> LatestTokens:
    """What the device has of each slot."""
    runner = llm.engine.replicas[0].runner
    assert isinstance(runner, LocalRunner)
    return runner._stages[-1].state.latest


def offline_drafts(target: CausalLM, head: DraftHead, tokens: list[int]) -> list[int]:
    """The drafts after these tokens, from one pass over them for each; in all but the first of a head that needs one
    for all, mask tokens stand for drafts."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    states = seen_states(target, head, padded)
    before = np.zeros_like(states)
    before[1 : len(tokens)] = states[: len(tokens) - 1]
    drafts, mask = [], head.mask_state(target)
    for index in range(len(tokens) - 1, len(tokens) - 1 + NUM_DRAFTS):
        token, state = draft_at(target, head, padded, before, index)
        drafts.append(int(token))
        padded[index + 1], before[index + 1] = (token, state) if mask is None else (MASK, mask)
    return drafts


def row_of(tokens: np.ndarray) -> TokenBatch:
    """One sequence in one page."""
    positions, zero = jnp.arange(LONGEST), jnp.zeros(1, jnp.int32)
    length, pages = jnp.array([LONGEST]), jnp.zeros(LONGEST, jnp.int32)
    row = AttentionBatch(zero[None], length, zero, length, jnp.int32(1), pages, positions, jnp.int32(0))
    return TokenBatch(jnp.asarray(tokens), positions, jnp.full(LONGEST, LONGEST), (row,))


def pools_of(module: CausalLM | DraftHead) -> tuple[list[Any], AttentionSettings]:
    """Empty pools, and settings of attention."""
    seen = attended(module.kv_specs)
    kernel = choose_attention(jax.devices()[0], "float32", "xla", seen[0].operation, page_size=LONGEST)
    specs = (kernel.implementation.pool_specs(1, LONGEST, spec.num_kv_heads, spec.head_dim) for spec in seen)
    pools = [tuple(jnp.zeros(array.shape) for array in arrays) for arrays in specs]
    return pools, AttentionSettings(kernel.implementation, LONGEST, decode_only=False)


def seen_states(target: CausalLM, head: DraftHead, tokens: np.ndarray) -> np.ndarray:
    pools, settings = pools_of(target)
    found = target.hidden(row_of(tokens), pools, settings, aux_layers=head.aux_layers)
    return np.array(head.seen_state(target, found.x, found.aux))


def draft_at(
    target: CausalLM, head: DraftHead, tokens: np.ndarray, before: np.ndarray, index: int
) -> tuple[np.ndarray, np.ndarray]:
    pools, settings = pools_of(head)
    batch = row_of(tokens)
    found = head.hidden(head.embedded(target, batch.tokens), jnp.asarray(before), batch, pools, settings)
    last = found.x[index : index + 1]
    return np.asarray(jnp.argmax(head.logits(target, last))), np.asarray(head.next_state(last)[0])


def test_a_row_begins_with_the_state_of_the_token_before_it() -> None:
    """That of its slot, or where a page begins that of the page before; none where a context begins."""
    states = HeadStates(jnp.arange(4.0)[:, None], 10 + jnp.arange(6.0)[:, None])
    table = jnp.array([[5, 2], [4, 1], [3, 0]])
    found = states.before(jnp.array([8, 3, 0]), jnp.array([2, 1, 0]), table, 8)
    assert found[:, 0].tolist() == [15.0, 1.0, 0.0]
    tokens, positions = jnp.array([[20.0], [21.0], [22.0]]), jnp.array([6, 7, 8])
    kept = states.updated(tokens, positions, jnp.array([5, 5, 2]), jnp.array([1]), jnp.array([3]), 8)
    assert kept.slots[:, 0].tolist() == [0.0, 1.0, 2.0, 21.0]
    assert kept.pages[:, 0].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 21.0]
