"""DFlash heads, end to end: the answers of the model alone, and the drafts that NumPy reads from the files."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.dflash_config import read_dflash
from jaxserve.models.loading import load_model, read_model_config
from jaxserve.scheduling.draft_passes import DraftPasses
from tests.block_heads import HEAD, MASK, block_hidden, write_dflash
from tests.head_pairs import (
    NUM_DRAFTS,
    PROMPTS,
    SAMPLED,
    SETTINGS,
    VOCAB,
    Pair,
    latest_tokens,
    padded,
    pools_of,
    row_of,
)
from tests.random_checkpoint import LLAMA, write_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("dflash")
    model, head = directory / "model", directory / "head"
    model.mkdir()
    write_checkpoint(model, {**LLAMA, "num_hidden_layers": 8, "vocab_size": VOCAB}, 0)
    write_tokenizer(model)
    write_dflash(head, HEAD)
    made = Pair("dflash", model, head, start=model)
    with made.llm:
        yield made


def outputs_of_layers(target: CausalLM, tokens: list[int]) -> np.ndarray:
    """Outputs of the target's layers that the head was trained on, for each token."""
    pools, settings = pools_of(target)
    after = [each + 1 for each in HEAD["dflash_config"]["target_layer_ids"]]
    aux = target.hidden(row_of(padded(tokens)), pools, settings, aux_layers=after).aux
    assert aux is not None
    return np.asarray(aux)[: len(tokens)]


def offline_drafts(pair: Pair, target: CausalLM, tokens: list[int], **options: bool) -> list[int]:
    """The drafts after these tokens, the last of which the target has not seen."""
    whole = load_file(pair.model / "model.safetensors")
    block = whole["model.embed_tokens.weight"][[tokens[-1], *[MASK] * NUM_DRAFTS]]
    aux = outputs_of_layers(target, tokens[:-1])
    hidden = block_hidden(load_file(pair.head / "model.safetensors"), HEAD, aux, block, **options)
    return (hidden[1:] @ whole["lm_head.weight"].T).argmax(-1).tolist()


def num_right_drafts(pair: Pair, num_tokens: int, **options: bool) -> int:
    """How many slots have the drafts of the files; see ``Pair``."""
    target = load_model(pair.model)
    return pair.num_right_drafts(num_tokens, lambda tokens: offline_drafts(pair, target, tokens, **options))


def test_drafts_on_the_device_are_those_of_the_files(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was rejected, computed in chunks, cached or filled by another row of the same step on the way; also
    after steps that made none."""
    for num_tokens in (9, 20):
        assert num_right_drafts(pair, num_tokens) == len(PROMPTS)
    assert num_right_drafts(pair, 20, causal=True) < len(PROMPTS), "mask tokens see those after them"
    found = 0
    for first in range(4):
        made = itertools.cycle([NUM_DRAFTS if i == first else 0 for i in range(4)])
        monkeypatch.setattr(DraftPasses, "choose", lambda *_, made=made: next(made))
        found += num_right_drafts(pair, 20)
    assert found > 0


def test_answers_are_those_without_a_head_and_drafts_the_same_from_the_cache(pair: Pair) -> None:
    """Greedy and sampled; what is cached, and what its pages held before, changes no draft."""
    counts = [pair.counts()]
    for _ in range(2):
        assert pair.answers(pair.llm, temperature=0.0) == pair.greedy
        counts.append(pair.counts())
    assert pair.answers(pair.llm, **SAMPLED) == pair.sampled
    first, again = counts[1] - counts[0], counts[2] - counts[1]
    assert tuple(first) == tuple(again) and first[0] > 200


@pytest.mark.slow
def test_drafts_on_another_mesh_are_those_of_the_files(pair: Pair) -> None:
    num_right_drafts(pair, 20)
    for mesh in ("tensor=2", "stage=2", "tensor=1"):
        assert pair.llm.reshard(mesh).num_pages > 0
        if mesh != "stage=2":
            for num_tokens in (1, 3, 9):
                assert num_right_drafts(pair, num_tokens) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "layout": "sequence_parallel"},
        {"tensor_parallel_size": 2, "layout": "split_logits"},
        {"tensor_parallel_size": 2, "layout": "context_parallel"},
        {"data_parallel_size": 2},
        {"attention_backend": "xla"},
    ],
    ids=str,
)
def test_answers_on_several_devices_are_those_without_a_head(pair: Pair, mesh: dict[str, Any]) -> None:
    found = []
    for more in ({}, {"speculative_config": pair.speculation}):
        with LLM(str(pair.model), **SETTINGS, **mesh, **more) as llm:
            found.append([pair.answers(llm, **{**SAMPLED, "seed": seed}) for seed in (5, 15)])
    assert found[0] == found[1]


def test_an_embedding_of_mask_tokens_and_a_head_of_its_own_are_used(pair: Pair, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    own = {name: random.normal(size=(360, 16)).astype(np.float32) for name in ("embed_tokens", "lm_head")}
    own = {f"{name}.weight": tensor for name, tensor in own.items()}
    mask = random.normal(size=16).astype(np.float32)
    changed: dict[str, Any] = {**own, "mask_embedding": mask}
    tensors = write_dflash(tmp_path, HEAD, **changed)
    speculation = {**pair.speculation, "model": str(tmp_path)}
    with LLM(str(pair.model), **SETTINGS, async_scheduling=False, speculative_config=speculation) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=pair.greedy[1][:1])
        llm.generate(PROMPTS[1], params, use_tqdm=False)
        drafts = np.asarray(latest_tokens(llm).drafts).tolist()
    prompt, target = PROMPTS[1]["prompt_token_ids"], load_model(pair.model)
    block = np.concatenate([own["embed_tokens.weight"][pair.greedy[1][:1]], np.tile(mask, (NUM_DRAFTS, 1))])
    hidden = block_hidden(tensors, HEAD, outputs_of_layers(target, prompt), block)
    assert (hidden[1:] @ own["lm_head.weight"].T).argmax(-1).tolist() in drafts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected one of DFlashDraftModel"),
        ({"vocab_size": 50}, "vocab_size: expected the 360 tokens of the target"),
        ({"hidden_size": 24}, "hidden_size: expected the 16 features of the target"),
        ({"num_target_layers": 9}, "num_target_layers: expected the 8 layers of the target"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window: heads whose layers"),
        ({"dflash_config": {"target_layer_ids": [1, 7], "mask_token_id": 3}}, "target_layer_ids: expected .* 0 to 6"),
        ({"dflash_config": {"target_layer_ids": [3, 1], "mask_token_id": 3}}, "target_layer_ids: .* in order"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 360}}, "mask_token_id: expected a token from"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {**HEAD["dflash_config"], "causal": True}}, "causal: heads of this form are not supported"),
    ],
)
def test_heads_that_do_not_fit_are_refused(pair: Pair, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_dflash(tmp_path, HEAD)
    (tmp_path / "config.json").write_text(json.dumps({**HEAD, **changes}))
    target = read_model_config(pair.model)
    with pytest.raises(ConfigError, match=message):
        read_dflash(tmp_path, target)
