"""Draft heads: what they draft against a reading of their files with NumPy, and heads that do not fit."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from checkpoints import CheckpointError
from jaxserve.api.errors import ConfigError
from jaxserve.layers.attention import AttentionSettings, Pools, choose_attention
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.draft_head import DraftHead
from jaxserve.models.drafters.eagle import read_eagle
from jaxserve.models.drafters.eagle3_config import read_eagle3
from jaxserve.models.drafters.mtp import MTP_ARCHITECTURES, mtp_config
from jaxserve.models.layer_stack import HiddenStates
from jaxserve.models.loading import load_model, read_model_config
from pallas_kernels import AttentionBatch
from tests import draft_heads
from tests.draft_heads import HEAD, Tensors, as_speculators, load_head, write_eagle, write_eagle3, write_mtp
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint

TARGET = {**LLAMA, "num_hidden_layers": 8}
FORMS: dict[str, dict[str, Any]] = {
    "original": HEAD,
    "original-two-layers": {
        **HEAD,
        "num_hidden_layers": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]},
    },
    "speculators": as_speculators(HEAD, norm_before_residual=True),
    "speculators-norms": as_speculators(HEAD, norm_before_fc=True, norm_output=True),
    "eagle-3.1": as_speculators(HEAD, fc_norm=True, norm_output=True, norm_before_residual=True),
}
LENGTH, PAGE_SIZE = 9, 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint(directory, TARGET, 0)
    return directory, load_model(directory)


def drafted(head: DraftHead, target: CausalLM, tokens: np.ndarray, states: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token, and after a second pass over the token that the first drafted last.

    The state before each token is given; the first token has an index of 0, as positions count only relatively.
    """
    kernel = choose_attention(jax.devices()[0], "float32", operation=head.kv_specs[0].operation, page_size=PAGE_SIZE)
    pools = list[Pools]()
    for spec in head.kv_specs:
        arrays = kernel.implementation.pool_specs(1, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        pools.append(tuple(jnp.zeros(array.shape) for array in arrays))
    settings, length = AttentionSettings(kernel.implementation, PAGE_SIZE, decode_only=False), len(tokens)

    def run(tokens: Any, states: jax.Array, pools: list[Pools], first: int) -> HiddenStates:
        positions, num_tokens = first + jnp.arange(len(tokens)), jnp.array([len(tokens)])
        row, zero = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        pages, length = jnp.zeros_like(positions), first + num_tokens
        table = AttentionBatch(row, length, zero, num_tokens, jnp.int32(1), pages, positions, jnp.int32(0))
        batch = TokenBatch(jnp.asarray(tokens), positions, jnp.full(len(tokens), PAGE_SIZE), (table,))
        return head.hidden(head.embedded(target, batch.tokens), states, batch, pools, settings)

    found = run(tokens, states, pools, 0)
    logits = head.logits(target, found.x)
    last = run(jnp.argmax(logits[-1:], 1), head.next_state(found.x[-1:]), found.pools, length)
    return np.asarray(logits), np.asarray(head.logits(target, last.x))


def embedding(target: CausalLM) -> np.ndarray:
    assert target.embed is not None
    return np.asarray(target.embed.weight[...])


Reading = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Returns logits and the states of drafted tokens for tokens and the states before them."""


def assert_drafts(found: tuple[np.ndarray, np.ndarray], read: Reading, tokens: np.ndarray, states: np.ndarray) -> None:
    """Both passes draft what is read from the files."""
    logits, fed_back = read(tokens, states)
    np.testing.assert_allclose(found[0], logits, atol=1e-4)
    longer = np.append(tokens, logits[-1].argmax())
    np.testing.assert_allclose(found[1], read(longer, np.append(states, fed_back[-1:], 0))[0][-1:], atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_eagle3_drafts_what_its_files_say(llama: tuple[Path, CausalLM], form: str, tmp_path: Path) -> None:
    directory, target = llama
    config, random = FORMS[form], np.random.default_rng(3)
    tensors = write_eagle3(tmp_path / "head", config)
    head = load_head("eagle3", tmp_path / "head", directory)
    assert head.aux_layers == ((0, 3, 7) if "eagle_config" in config else (2, 4, 5))
    tokens, table = random.integers(0, 51, LENGTH), embedding(target)
    aux = random.normal(size=(LENGTH, 48)).astype(np.float32)

    def read(tokens: np.ndarray, states: np.ndarray, tensors: Tensors = tensors) -> tuple[np.ndarray, np.ndarray]:
        hidden = draft_heads.eagle3_hidden(tensors, config, table[tokens], states, 1)
        return draft_heads.eagle3_logits(tensors, hidden, 51), draft_heads.eagle3_fed_back(tensors, config, hidden)

    found = drafted(head, target, tokens, head.seen_state(target, jnp.zeros((LENGTH, 16)), jnp.asarray(aux)))
    states = draft_heads.eagle3_states(tensors, config, aux)
    assert_drafts(found, read, tokens, states)
    fc = np.split(tensors["fc.weight"], 3, 1)
    swapped = {**tensors, "fc.weight": np.concatenate([fc[1], fc[0], fc[2]], 1)}
    breaks = {
        "fc's parts": (tokens, draft_heads.eagle3_states(swapped, config, aux)),
        "an entry at i": (np.roll(tokens, 1), states),
        "another state": (tokens, np.roll(states, 1, 0)),
    }
    own = np.isfinite(found[0][0])
    for name, inputs in breaks.items():
        assert np.abs(found[0][1:, own] - read(*inputs)[0][1:, own]).max() > 0.1, name


@pytest.mark.parametrize("size", [48, 16])
def test_the_state_before_mask_tokens_is_the_files(llama: tuple[Path, CausalLM], size: int, tmp_path: Path) -> None:
    """As large as what is projected, it is projected; heads that draft in turn need none."""
    directory, target = llama
    tensors = write_eagle3(tmp_path, HEAD, mask_size=size)
    assert load_head("eagle3", tmp_path, directory).mask_state(target) is None
    found = load_head("eagle3", tmp_path, directory, in_one_pass=True).mask_state(target)
    given = tensors["mask_hidden"]
    expected = draft_heads.eagle3_states(tensors, HEAD, given)[0] if size == 48 else given[0]
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_mask_state_of_another_size_is_refused(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    write_eagle3(tmp_path, HEAD, mask_size=24)
    assert read_eagle3(tmp_path, read_model_config(llama[0])).mask_size is None
    with pytest.raises(ConfigError, match=r"mask_hidden: expected a tensor of shape \[1, 48\] or .*, got \[1, 24\]"):
        read_eagle3(tmp_path, read_model_config(llama[0]), in_one_pass=True)


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_drafts_what_its_files_say(llama: tuple[Path, CausalLM], bias: bool, tmp_path: Path) -> None:
    """It reads what the target's output head reads, which also reads its own output, without a norm between."""
    directory, target = llama
    config = {key: value for key, value in HEAD.items() if key != "draft_vocab_size"}
    config["architectures"] = ["LlamaForCausalLM"]
    tensors = write_eagle(tmp_path / "head", config, bias=bias)
    head = load_head("eagle", tmp_path / "head", directory)
    whole, random = load_file(directory / "model.safetensors"), np.random.default_rng(4)
    tokens, table = random.integers(0, 51, LENGTH), embedding(target)
    hidden = random.normal(size=(LENGTH, 16)).astype(np.float32)
    states = draft_heads.norm(hidden, whole["model.norm.weight"], 1e-6)

    def read(tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = draft_heads.eagle_hidden(tensors, config, table[tokens], states, 1)
        return found @ whole["lm_head.weight"].T, found

    found = drafted(head, target, tokens, head.seen_state(target, jnp.asarray(hidden), None))
    assert_drafts(found, read, tokens, states)
    for broken in ((np.roll(tokens, 1), states), (tokens, np.roll(states, 1, 0)), (tokens, hidden)):
        assert np.abs(found[0][1:] - read(*broken)[0][1:]).max() > 0.1


def test_eagle_heads_of_another_kind_are_refused(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    target, head = read_model_config(llama[0]), tmp_path / "head"
    write_eagle3(head, {**HEAD, "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="is an EAGLE-3 head; use the method eagle3"):
        read_eagle(head, target)
    (head / "config.json").write_text(json.dumps(HEAD))
    with pytest.raises(
        ConfigError, match="architectures: expected one of LlamaForCausalLM, EagleLlamaForCausalLM, got"
    ):
        read_eagle(head, target)
    with pytest.raises(ConfigError, match="is not an EAGLE head, as it has no tensor fc.weight"):
        read_eagle(llama[0], target)
    config = {**HEAD, "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "vocab_size": 50}
    write_eagle(head, config)
    with pytest.raises(
        ConfigError, match="vocab_size: expected the 51 of the target (?s:.*)hidden_size: expected the 16"
    ):
        read_eagle(head, target)


def test_a_head_saved_by_torch_is_the_same(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = write_eagle3(tmp_path, HEAD)
    one = load_head("eagle3", tmp_path, llama[0])
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    other = load_head("eagle3", tmp_path, llama[0])
    assert one.token_ids == other.token_ids
    for each, expected in zip(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(nnx.state(one)), strict=True):
        np.testing.assert_array_equal(each, expected)


def test_mtp_drafts_what_its_files_say(tmp_path: Path) -> None:
    tensors = write_mtp(tmp_path, DEEPSEEK)
    head, target = load_head("mtp", tmp_path, tmp_path), load_model(tmp_path)
    random = np.random.default_rng(5)
    tokens, table = random.integers(0, 51, LENGTH), embedding(target)
    hidden = random.normal(size=(LENGTH, 16)).astype(np.float32)
    states = draft_heads.norm(hidden, tensors["model.norm.weight"], 1e-6)

    def read(tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = draft_heads.mtp_hidden(tensors, DEEPSEEK, table[tokens], states, 1)
        return draft_heads.mtp_logits(tensors, DEEPSEEK, found)

    found = drafted(head, target, tokens, head.seen_state(target, jnp.asarray(hidden), None))
    assert_drafts(found, read, tokens, states)
    for broken in ((np.roll(tokens, 1), states), (tokens, np.roll(states, 1, 0)), (tokens, hidden)):
        assert np.abs(found[0][1:] - read(*broken)[0][1:]).max() > 0.1


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_padding_is_not_projected(
    llama: tuple[Path, CausalLM], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the states of tokens, where a head projects them, nor they together with embeddings."""
    (directory, target), random = llama, np.random.default_rng(6)
    if method == "mtp":
        write_mtp(tmp_path, DEEPSEEK)
        directory, target = tmp_path, load_model(tmp_path)
    elif method == "eagle":
        write_eagle(tmp_path, {**HEAD, "architectures": ["LlamaForCausalLM"]})
    else:
        write_eagle3(tmp_path, HEAD)
    head = load_head(method, tmp_path, directory)
    hidden, aux, embedded = (jnp.asarray(random.normal(size=(LENGTH, width)), jnp.float32) for width in (16, 48, 16))
    states = head.seen_state(target, hidden, aux)
    inputs = head.combined(embedded, states)
    draft_heads.spoil_padding(monkeypatch)
    few = jnp.int32(LENGTH - 3)
    found = head.seen_state(target, hidden, aux, few), head.combined(embedded, states, few)
    for each, expected in zip(found, (states, inputs), strict=True):
        np.testing.assert_array_equal(each[:few], expected[:few])
    spoiled = [bool(jnp.isnan(each[few:]).all()) for each in found]
    assert spoiled == ([True, False] if method == "eagle3" else [False, True])


@pytest.mark.parametrize("architecture", MTP_ARCHITECTURES)
def test_the_layer_is_the_familys_own(architecture: str, tmp_path: Path) -> None:
    """All of its tensors are those of the layer after the model's last, which is like that."""
    own = {"architectures": [architecture], "num_nextn_predict_layers": 1}
    tensors = write_mtp(tmp_path, {**DEEPSEEK, **own})
    head = load_head("mtp", tmp_path, tmp_path)
    last, extra = (
        {name.removeprefix(layer) for name in tensors if name.startswith(layer)}
        for layer in ("model.layers.1.", "model.layers.2.")
    )
    names = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert extra == last | {f"{name}.weight" for name in names}
    assert len(head.kv_specs) == 1


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"vocab_size": 50}, "vocab_size: expected the 51 tokens of the target"),
        ({"hidden_size": 24, "head_dim": 8}, "hidden_size: expected the 16 features of the target"),
        ({"target_hidden_size": 8}, "target_hidden_size: expected the 16 features"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, "of the 8 of the target"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "different layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: expected true"),
        ({"draft_vocab_size": 21}, "d2t: expected 21 integers"),
        ({"parallel_drafting": True}, r"mask_hidden: expected .* \[1, 48\] or \[1, 16\], the checkpoint has no such"),
        ({"architectures": ["LlamaForCausalLMMedusa"]}, "architectures: expected one of LlamaForCausalLMEagle3"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type: expected eagle3 or peagle, got 'dflash'"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    llama: tuple[Path, CausalLM], changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    write_eagle3(tmp_path, HEAD)
    (tmp_path / "config.json").write_text(json.dumps({**HEAD, **changes}))
    with pytest.raises(ConfigError, match=key):
        read_eagle3(tmp_path, read_model_config(llama[0]))


def test_draft_vocabularies_outside_the_targets_are_refused(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    target = read_model_config(llama[0])
    write_eagle3(tmp_path, HEAD, d2t=np.full(20, 40))
    with pytest.raises(ConfigError, match="d2t: expected different tokens of the 51 of the target, got 40 to 59"):
        read_eagle3(tmp_path, target)
    write_eagle3(tmp_path, HEAD, d2t=None)
    with pytest.raises(ConfigError, match="draft_vocab_size: is 20, not 51, so the checkpoint needs the tensor d2t"):
        read_eagle3(tmp_path, target)
    with pytest.raises(ConfigError, match="expected different layers of the 2 of the target"):
        read_eagle3(tmp_path, dataclasses.replace(target, num_layers=2))


def test_a_projection_of_another_width_is_refused(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    changed: dict[str, Any] = {"fc.weight": np.zeros((16, 32), np.float32)}
    write_eagle3(tmp_path, HEAD, **changed)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[16, 32\], expected \[16, 48\]"):
        load_head("eagle3", tmp_path, llama[0])


def test_models_without_the_layer_are_refused(llama: tuple[Path, CausalLM], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mtp': LlamaForCausalLM has no layer for multi-token prediction"):
        mtp_config(read_model_config(llama[0]))
    write_checkpoint(tmp_path, DEEPSEEK, 0)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=0"):
        mtp_config(read_model_config(tmp_path, {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"has no tensors of .*, model.layers.2, which quantized copies"):
        load_head("mtp", tmp_path, tmp_path)
