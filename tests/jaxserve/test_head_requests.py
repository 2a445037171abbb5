"""Requests with draft heads, end to end: the answers of the model alone, and drafts that depend on the tokens alone."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM
from jaxserve.device.head_states import HeadStates
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.loading import load_model
from jaxserve.scheduling.draft_passes import DraftPasses
from tests.draft_heads import HEAD, as_speculators, load_head, spoil_padding, write_eagle, write_eagle3, write_mtp
from tests.head_pairs import MASK, NUM_DRAFTS, PROMPTS, SAMPLED, SETTINGS, VOCAB, Pair, padded, pools_of, row_of
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint, write_tokenizer


def foreseeable(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model whose next token depends on the latest one above all, and an MTP layer that looks at it alike."""
    layer, size = "model.layers.2", 16
    weak = {name: tensor / 8 for name, tensor in tensors.items() if "o_proj" in name or "down_proj" in name}
    projection = np.concatenate([np.eye(size), tensors[f"{layer}.eh_proj.weight"][:, size:] / 8], 1)
    norms = {f"{layer}.enorm.weight": np.ones(size), f"{layer}.shared_head.norm.weight": tensors["model.norm.weight"]}
    changed = {**weak, **norms, f"{layer}.eh_proj.weight": projection}
    return {**tensors, **{name: tensor.astype(np.float32) for name, tensor in changed.items()}}


def make_pair(directory: Path, method: str) -> Pair:
    """A pair of a method; ``peagle``: a head of EAGLE-3 that drafts in one pass."""
    model, head = directory / "model", directory / "head"
    model.mkdir()
    if method == "mtp":
        tensors = write_mtp(model, {**DEEPSEEK, "vocab_size": VOCAB})
        save_file(foreseeable(tensors), model / "model.safetensors")
    else:
        write_checkpoint(model, {**LLAMA, "num_hidden_layers": 8, "vocab_size": VOCAB}, 0)
    write_tokenizer(model)
    if method == "mtp":
        return Pair(method, model, model, is_named=False, start=model)
    if method == "eagle":
        write_eagle(head, {**HEAD, "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB})
        return Pair(method, model, head, start=model)
    named = {"verifier": {"name_or_path": str(model)}}
    config = as_speculators({**HEAD, "vocab_size": VOCAB, "draft_vocab_size": 200}, speculators_config=named)
    one_pass = {"speculators_model_type": "peagle", "mask_token_id": MASK} if method == "peagle" else {}
    write_eagle3(head, {**config, **one_pass}, mask_size=48 if one_pass else None)
    return Pair("eagle3", model, head, start=head)


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("eagle3", "eagle")]


@pytest.fixture(scope="module", params=["mtp", "peagle", *SLOW])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = make_pair(tmp_path_factory.mktemp(request.param), request.param)
    with made.llm:
        yield made


def num_right_drafts(pair: Pair, num_tokens: int) -> int:
    """How many slots have the drafts of a pass over their text; see ``Pair``."""
    target, head = load_model(pair.model), load_head(pair.method, pair.head, pair.model)
    return pair.num_right_drafts(num_tokens, lambda tokens: offline_drafts(target, head, tokens))


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


def offline_drafts(target: CausalLM, head: ChainHead, tokens: list[int]) -> list[int]:
    """The drafts after these tokens, from one pass over them for each; in all but the first of a head that needs one
    for all, mask tokens stand for drafts."""
    row = padded(tokens)
    states = seen_states(target, head, row)
    before = np.zeros_like(states)
    before[1 : len(tokens)] = states[: len(tokens) - 1]
    drafts, mask = [], head.mask_state(target)
    for index in range(len(tokens) - 1, len(tokens) - 1 + NUM_DRAFTS):
        token, state = draft_at(target, head, row, before, index)
        drafts.append(int(token))
        row[index + 1], before[index + 1] = (token, state) if mask is None else (MASK, mask)
    return drafts


def seen_states(target: CausalLM, head: ChainHead, tokens: np.ndarray) -> np.ndarray:
    pools, settings = pools_of(target)
    found = target.hidden(row_of(tokens), pools, settings, aux_layers=head.aux_layers)
    return np.array(head.seen_state(target, found.x, found.aux))


def draft_at(
    target: CausalLM, head: ChainHead, tokens: np.ndarray, before: np.ndarray, index: int
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
