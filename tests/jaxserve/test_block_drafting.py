"""DFlash heads, end to end: the answers of the model alone, and the drafts that NumPy reads from the files."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.api.metric_types import Counter
from jaxserve.device.runner import LocalRunner
from jaxserve.device.step_batch import LatestTokens
from jaxserve.layers.attention import AttentionSettings, choose_attention
from jaxserve.layers.kv_layout import attended
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.dflash_config import read_dflash
from jaxserve.models.loading import load_model, read_model_config
from jaxserve.scheduling.draft_passes import DraftPasses
from pallas_kernels import AttentionBatch
from tests.block_heads import HEAD, MASK, block_hidden, write_dflash
from tests.random_checkpoint import LLAMA, write_checkpoint, write_tokenizer

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 80,
    "compilation_cache_dir": "",
}
LONGEST, NUM_DRAFTS = 64, 3
PROMPTS = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (8, 10, 16, 25)]
"""More than a step holds, so that one is computed in chunks; some end with a page that others go on from."""
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


class Pair:
    """A model with a head, the answers of the model alone, and an engine with the head."""

    def __init__(self, directory: Path):
        self.model, self.head = directory / "model", directory / "head"
        self.model.mkdir()
        write_checkpoint(self.model, {**LLAMA, "num_hidden_layers": 8, "vocab_size": 360}, 0)
        write_tokenizer(self.model)
        self.tensors = write_dflash(self.head, HEAD)
        with LLM(str(self.model), **SETTINGS) as alone:
            self.greedy, self.sampled = (self.answers(alone, **options) for options in ({"temperature": 0.0}, SAMPLED))
        number = {"num_speculative_tokens": NUM_DRAFTS, "enable_adaptive_verification": False}
        self.speculation = {"method": "dflash", "model": str(self.head), **number}
        self.llm = LLM(str(self.model), **SETTINGS, speculative_config=self.speculation)

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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("dflash"))
    with made.llm:
        yield made


def latest_tokens(llm: LLM) -> LatestTokens:
    """What the device has of each slot."""
    runner = llm.engine.replicas[0].runner
    assert isinstance(runner, LocalRunner)
    return runner._stages[-1].state.latest


def outputs_of_layers(target: CausalLM, tokens: list[int]) -> np.ndarray:
    """Outputs of the target's layers that the head was trained on, for each token."""
    padded, positions, zero = np.zeros(LONGEST, np.int32), jnp.arange(LONGEST), jnp.zeros(1, jnp.int32)
    padded[: len(tokens)] = tokens
    length, pages = jnp.array([LONGEST]), jnp.zeros(LONGEST, jnp.int32)
    row = AttentionBatch(zero[None], length, zero, length, jnp.int32(1), pages, positions, jnp.int32(0))
    batch = TokenBatch(jnp.asarray(padded), positions, jnp.full(LONGEST, LONGEST), (row,))
    seen = attended(target.kv_specs)
    kernel = choose_attention(jax.devices()[0], "float32", "xla", seen[0].operation, page_size=LONGEST)
    specs = (kernel.implementation.pool_specs(1, LONGEST, spec.num_kv_heads, spec.head_dim) for spec in seen)
    pools = [tuple(jnp.zeros(array.shape) for array in arrays) for arrays in specs]
    settings = AttentionSettings(kernel.implementation, LONGEST, decode_only=False)
    after = [each + 1 for each in HEAD["dflash_config"]["target_layer_ids"]]
    aux = target.hidden(batch, pools, settings, aux_layers=after).aux
    assert aux is not None
    return np.asarray(aux)[: len(tokens)]


def offline_drafts(pair: Pair, target: CausalLM, tokens: list[int], **options: bool) -> list[int]:
    """The drafts after these tokens, the last of which the target has not seen."""
    whole = load_file(pair.model / "model.safetensors")
    block = whole["model.embed_tokens.weight"][[tokens[-1], *[MASK] * NUM_DRAFTS]]
    aux = outputs_of_layers(target, tokens[:-1])
    hidden = block_hidden(pair.tensors, HEAD, aux, block, **options)
    return (hidden[1:] @ whole["lm_head.weight"].T).argmax(-1).tolist()


def num_right_drafts(pair: Pair, num_tokens: int, **options: bool) -> int:
    """Answer until the token after ``num_tokens``; return how many slots have the drafts of the files."""
    target = load_model(pair.model)
    stops = [answer[num_tokens] for answer in pair.greedy]
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[s]) for s in stops]
    pair.llm.generate(PROMPTS, params, use_tqdm=False)
    latest = latest_tokens(pair.llm)
    assert latest.drafts is not None
    texts = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in zip(PROMPTS, pair.greedy, strict=True)]
    found = 0
    for slot, position in enumerate(np.asarray(latest.positions)):
        begins = [text[: position + 1] for text in texts if text[position] == latest.token_ids[slot]]
        expected = [offline_drafts(pair, target, begin, **options) for begin in begins]
        found += np.asarray(latest.drafts[slot]).tolist() in expected
    return found


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
    target = dataclasses.replace(read_model_config(pair.model))
    with pytest.raises(ConfigError, match=message):
        read_dflash(tmp_path, target)
