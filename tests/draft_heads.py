"""Random draft heads on disk, and what they draft, read from the files with NumPy alone."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from jaxserve.layers import linear
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import abstract_head
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.drafters.mtp import MTPHead, mtp_config
from jaxserve.models.drafters.source import find_head
from jaxserve.models.loading import read_model_config
from jaxserve.models.output_head import model_listings
from tests.random_checkpoint import write_checkpoint

Tensors = Mapping[str, np.ndarray]
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 51,
    "draft_vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
"""A ``config.json`` in the original format, for the target ``random_checkpoint.LLAMA``; its layers are to be given."""
_OWN = ("architectures", "draft_vocab_size")


def as_speculators(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same head in speculators' format."""
    layer = {key: value for key, value in config.items() if key not in _OWN and not key.startswith("eagle")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"),
        "transformer_layer_config": {"model_type": "llama", **layer},
        **changes,
    }


def eagle3_shapes(config: dict[str, Any], first: str, aux: int = 3) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors; ``first`` is the name of its first layer."""
    layer = config.get("transformer_layer_config", config)
    size, ffn, heads = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    query, key = layer["num_attention_heads"] * heads, layer["num_key_value_heads"] * heads
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, aux * size), f"{first}.hidden_norm.weight": (size,)}
    for index in range(layer["num_hidden_layers"]):
        name, inner = f"layers.{index}" if index else first, size if index else 2 * size
        shapes |= {f"{name}.{norm}.weight": (size,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (query, inner) for part in "q"}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (key, inner) for part in "kv"}
        shapes |= {f"{name}.self_attn.o_proj.weight": (size, query), f"{name}.mlp.down_proj.weight": (size, ffn)}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (ffn, size) for part in ("gate", "up")}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (aux * size,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (size,) for index in range(aux)}
    return shapes | {"norm.weight": (size,), "lm_head.weight": (config["draft_vocab_size"], size)}


def write_eagle3(
    directory: Path, config: dict[str, Any], seed: int = 0, mask_size: int | None = None, **changed: Any
) -> dict[str, np.ndarray]:
    """Writes a head, with a state of this size before mask tokens, and returns its tensors; ``changed`` are tensors
    that replace random ones, None for missing."""
    first = "layers.0" if "speculators_model_type" in config else "midlayer"
    shapes = eagle3_shapes(config, first)
    tensors = _random(shapes if mask_size is None else shapes | {"mask_hidden": (1, mask_size)}, seed)
    tokens = np.arange(config.get("transformer_layer_config", config)["vocab_size"])
    ids = np.sort(np.random.default_rng(seed).permutation(tokens)[: config["draft_vocab_size"]])
    tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(tokens, ids), **changed}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def write_eagle(directory: Path, config: dict[str, Any], seed: int = 0, *, bias: bool = True) -> dict[str, np.ndarray]:
    """Writes an EAGLE head and returns its tensors, with a copy of an embedding, as checkpoints have it."""
    shapes = eagle3_shapes({**config, "draft_vocab_size": 1}, "layers.0", 2)
    size, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    shapes = {
        name: (shape[0], size) if name.startswith("layers.0.self_attn") else shape for name, shape in shapes.items()
    }
    shapes |= {"layers.0.self_attn.o_proj.weight": (size, inner), "embed_tokens.weight": (config["vocab_size"], size)}
    for absent in ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight"):
        del shapes[absent]
    tensors = _random(shapes | ({"fc.bias": (size,)} if bias else {}), seed)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def write_mtp(directory: Path, config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Writes a model with a layer for multi-token prediction, and copies of embedding and head beside it."""
    write_checkpoint(directory, config, seed)
    return _add_mtp(directory, load_file(directory / "model.safetensors"), seed + 1)


def write_llama_with_mtp(directory: Path, llama: Path) -> None:
    """Writes a Llama as a GLM-4.5, which computes the same, with a random layer for multi-token prediction."""
    shutil.copytree(llama, directory, dirs_exist_ok=True)
    config = json.loads((llama / "config.json").read_text())
    changes = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "partial_rotary_factor": 1.0}
    dense = {"first_k_dense_replace": config["num_hidden_layers"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | changes | dense))
    _add_mtp(directory, load_file(llama / "model.safetensors"), seed=0)


def _add_mtp(directory: Path, tensors: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    found = mtp_config(read_model_config(directory))
    device = SingleDeviceSharding(jax.devices()[0])
    head = abstract_head(lambda scope: MTPHead(found, scope=scope), Scope(), lambda axes: device)
    embedding = tensors["model.embed_tokens.weight"]
    layer = f"model.layers.{found.num_layers}"
    tensors |= _random(dict(head.listings[0]), seed)
    tensors |= {f"{layer}.embed_tokens.weight": embedding}
    tensors |= {f"{layer}.shared_head.head.weight": tensors.get("lm_head.weight", embedding)}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def load_head(method: str, directory: Path, target: Path, in_one_pass: bool = False) -> ChainHead:
    """Checks and loads a head on one device, as the engine does."""
    device, config = SingleDeviceSharding(jax.devices()[0]), read_model_config(target)
    source = find_head(method, directory, config, in_one_pass=in_one_pass)
    head = source.abstract(Scope(), lambda axes: device)
    source.check(head, model_listings(config))
    module = head.merge_module(source.load(head, model_listings(config)))
    assert isinstance(module, ChainHead)
    return module


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(0.0, 0.4, shape).astype(np.float32) for name, shape in sorted(shapes.items())}


def spoil_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes linear layers return NaN for the rows that they need not compute, as kernels do that skip them."""
    matmul = linear.matmul

    def spoiling(param: Any, x: jax.Array, *, fused: Any, num_rows: jax.Array | None = None) -> jax.Array:
        found = matmul(param, x, fused=fused, num_rows=num_rows)
        return found if num_rows is None else jnp.where(jnp.arange(len(x))[:, None] < num_rows, found, jnp.nan)

    monkeypatch.setattr(linear, "matmul", spoiling)


# --------------------------------------------------------------------------------------------- the reading


def eagle3_states(tensors: Tensors, config: dict[str, Any], aux: np.ndarray) -> np.ndarray:
    """States of tokens that the target has seen, from the inputs of its layers side by side."""
    if "input_norm.weight" in tensors:
        aux = norm(aux, tensors["input_norm.weight"], 1e-5)
    if "fc_norm.0.weight" in tensors:
        parts = np.split(aux, 3, 1)
        aux = np.concatenate([norm(x, tensors[f"fc_norm.{i}.weight"], 1e-5) for i, x in enumerate(parts)], 1)
    return aux @ tensors["fc.weight"].T


def eagle3_hidden(
    tensors: Tensors, config: dict[str, Any], embedded: np.ndarray, states: np.ndarray, first: int
) -> np.ndarray:
    """Output of the last layer for tokens at positions from ``first`` on, which see those before."""
    layer = config.get("transformer_layer_config", config)
    size, name = layer["head_dim"], "layers.0" if "layers.0.hidden_norm.weight" in tensors else "midlayer"
    positions, x = first + np.arange(len(states)), states
    for index in range(layer["num_hidden_layers"]):
        name = f"layers.{index}" if index else name
        weight = below(tensors, f"{name}.")
        if index == 0:
            normed = norm(x, weight["hidden_norm.weight"], 1e-5)
            x = normed if config.get("norm_before_residual") else x
            inner = np.concatenate([norm(embedded, weight["input_layernorm.weight"], 1e-5), normed], 1)
        else:
            inner = norm(x, weight["input_layernorm.weight"], 1e-5)
        x = x + _grouped_attention(inner, weight, size, positions)
        x = x + mlp(norm(x, weight["post_attention_layernorm.weight"], 1e-5), weight, "mlp.")
    return x


def eagle_hidden(
    tensors: Tensors, config: dict[str, Any], embedded: np.ndarray, states: np.ndarray, first: int
) -> np.ndarray:
    """Output of an EAGLE head's layer, both logits' input and the states of drafted tokens."""
    weight = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    x = np.concatenate([embedded, states], 1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
    x = x + _grouped_attention(x, weight, config["head_dim"], first + np.arange(len(x)))
    return x + mlp(norm(x, weight["post_attention_layernorm.weight"], 1e-5), weight, "mlp.")


def eagle3_fed_back(tensors: Tensors, config: dict[str, Any], hidden: np.ndarray) -> np.ndarray:
    """States of drafted tokens."""
    return norm(hidden, tensors["norm.weight"], 1e-5) if config.get("norm_output") else hidden


def eagle3_logits(tensors: Tensors, hidden: np.ndarray, vocab_size: int) -> np.ndarray:
    """Logits of the target's vocabulary."""
    scores = norm(hidden, tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T
    logits = np.full((len(hidden), vocab_size), -np.inf, np.float32)
    logits[:, np.arange(scores.shape[1]) + tensors["d2t"]] = scores
    return logits


def mtp_hidden(
    tensors: Tensors, config: dict[str, Any], embedded: np.ndarray, states: np.ndarray, first: int
) -> np.ndarray:
    """Output of the MTP layer of a DeepSeek-V3 for tokens at positions from ``first`` on; experts sit in groups."""
    weight = below(tensors, f"model.layers.{config['num_hidden_layers']}.")
    parts = [norm(embedded, weight["enorm.weight"], 1e-6), norm(states, weight["hnorm.weight"], 1e-6)]
    x, positions = np.concatenate(parts, 1) @ weight["eh_proj.weight"].T, first + np.arange(len(states))
    x = x + _latent_attention(norm(x, weight["input_layernorm.weight"], 1e-6), weight, config, positions)
    y = norm(x, weight["post_attention_layernorm.weight"], 1e-6)
    return x + (_experts(y, weight, config) if "mlp.gate.weight" in weight else mlp(y, weight, "mlp."))


def llama_states(tensors: Tensors, head_dim: int, tokens: np.ndarray) -> list[np.ndarray]:
    """Input of each layer of a Llama, and the output of the last."""

    def attend(x: np.ndarray, weight: Tensors) -> np.ndarray:
        return _grouped_attention(x, weight, head_dim, np.arange(len(tokens)))

    return _layers(tensors, tokens, attend, 1e-5)


def deepseek_states(tensors: Tensors, config: dict[str, Any], tokens: np.ndarray) -> list[np.ndarray]:
    """The same of a DeepSeek-V3 without experts; a layer for multi-token prediction is none of them."""

    def attend(x: np.ndarray, weight: Tensors) -> np.ndarray:
        return _latent_attention(x, weight, config, np.arange(len(tokens)))

    last = f"model.layers.{config['num_hidden_layers']}."
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    return _layers(own, tokens, attend, 1e-6)


def _layers(
    tensors: Tensors, tokens: np.ndarray, attend: Callable[[np.ndarray, Tensors], np.ndarray], eps: float
) -> list[np.ndarray]:
    states = [tensors["model.embed_tokens.weight"][tokens]]
    while weight := below(tensors, f"model.layers.{len(states) - 1}."):
        x = states[-1] + attend(norm(states[-1], weight["input_layernorm.weight"], eps), weight)
        states.append(x + mlp(norm(x, weight["post_attention_layernorm.weight"], eps), weight, "mlp."))
    return states


def below(tensors: Tensors, name: str) -> Tensors:
    """The tensors of a module, with names within it."""
    return {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}


def _grouped_attention(x: np.ndarray, weight: Tensors, head_dim: int, positions: np.ndarray) -> np.ndarray:
    parts = ((x @ weight[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, head_dim) for part in "qkv")
    query, key, value = parts
    query, key = rotate(query, positions, halves=True), rotate(key, positions, halves=True)
    group = query.shape[1] // key.shape[1]
    attended = attention(query, np.repeat(key, group, 1), np.repeat(value, group, 1), head_dim**-0.5)
    return attended.reshape(len(x), -1) @ weight["self_attn.o_proj.weight"].T


def _latent_attention(x: np.ndarray, weight: Tensors, config: dict[str, Any], positions: np.ndarray) -> np.ndarray:
    heads, rank, plain = config["num_attention_heads"], config["kv_lora_rank"], config["qk_nope_head_dim"]
    weight = {key.removeprefix("self_attn."): tensor for key, tensor in weight.items()}
    query = norm(x @ weight["q_a_proj.weight"].T, weight["q_a_layernorm.weight"], 1e-6) @ weight["q_b_proj.weight"].T
    query = query.reshape(len(x), heads, -1)
    query = np.concatenate([query[..., :plain], rotate(query[..., plain:], positions)], -1)
    down = x @ weight["kv_a_proj_with_mqa.weight"].T
    latent = norm(down[:, :rank], weight["kv_a_layernorm.weight"], 1e-6)
    up = (latent @ weight["kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    rotated = np.repeat(rotate(down[:, None, rank:], positions), heads, 1)
    key = np.concatenate([up[..., :plain], rotated], -1)
    attended = attention(query, key, up[..., plain:], key.shape[-1] ** -0.5)
    return attended.reshape(len(x), -1) @ weight["o_proj.weight"].T


def _experts(x: np.ndarray, weight: Tensors, config: dict[str, Any]) -> np.ndarray:
    scores = 1 / (1 + np.exp(-(x @ weight["mlp.gate.weight"].T)))
    corrected = scores + weight["mlp.gate.e_score_correction_bias"]
    result = mlp(x, weight, "mlp.shared_experts.")
    for row in range(len(x)):
        groups = corrected[row].reshape(config["n_group"], -1)
        best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1))[: config["topk_group"]]
        allowed = np.isin(np.arange(groups.size) // groups.shape[1], best)
        chosen = np.argsort(-np.where(allowed, corrected[row], -np.inf))[: config["num_experts_per_tok"]]
        shares = scores[row, chosen] / scores[row, chosen].sum() * 2.5
        for expert, share in zip(chosen, shares, strict=True):
            result[row] += share * mlp(x[row : row + 1], weight, f"mlp.experts.{expert}.")[0]
    return result


def mtp_logits(tensors: Tensors, config: dict[str, Any], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits, from the copy of the output head beside the layer, and the states of drafted tokens."""
    name = f"model.layers.{config['num_hidden_layers']}.shared_head"
    normed = norm(hidden, tensors[f"{name}.norm.weight"], 1e-6)
    return normed @ tensors[f"{name}.head.weight"].T, normed


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, *, halves: bool = False) -> np.ndarray:
    """Rotates pairs of features: (i, i + half), or neighbours."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    one, other = (x[..., :half], x[..., half:]) if halves else (x[..., ::2], x[..., 1::2])
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = one * cos - other * sin, other * cos + one * sin
    return np.concatenate(rotated, -1) if halves else np.stack(rotated, -1).reshape(x.shape)


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, *, causal: bool = True
) -> np.ndarray:
    """Attention of the last tokens to all, or to those up to their own."""
    scores = np.einsum("tnh,snh->nts", query, key) * scale
    if causal:
        scores = np.where(np.tri(len(query), len(key), len(key) - len(query), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), value)


def mlp(x: np.ndarray, weight: Tensors, name: str) -> np.ndarray:
    gate, up = (x @ weight[f"{name}{part}_proj.weight"].T for part in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ weight[f"{name}down_proj.weight"].T
