"""Takes tensors of Hugging Face's checkpoints apart as GGUF files have them, and assembles them again, in NumPy."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.gguf_files import interleave

Tensors = dict[str, np.ndarray]
Config = Mapping[str, Any]


class Arrangement(NamedTuple):
    """How a file has the tensors of a layer that it has in other pieces.

    Attributes:
        apart: From a layer's tensors, by the end of their names, those of the file, by the end of their names.
        together: The other way round.
    """

    apart: Callable[[Config, Tensors], Tensors]
    together: Callable[[Config, Tensors], Tensors]


def deinterleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of queries or keys in Hugging Face's order."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _baichuan_apart(config: Config, layer: Tensors) -> Tensors:
    q, k, v = np.split(layer["self_attn.W_pack.weight"], 3)
    heads = config["num_attention_heads"]
    return {
        "attn_q.weight": interleave(q, heads),
        "attn_k.weight": interleave(k, heads),
        "attn_v.weight": np.ascontiguousarray(v),
    }


def _baichuan_together(config: Config, layer: Tensors) -> Tensors:
    heads = config["num_attention_heads"]
    q, k = (deinterleave(layer[f"attn_{each}.weight"], heads) for each in "qk")
    return {"self_attn.W_pack.weight": np.concatenate([q, k, layer["attn_v.weight"]])}


def _deepseek_apart(config: Config, layer: Tensors) -> Tensors:
    joint = layer["self_attn.kv_b_proj.weight"]
    heads = joint.reshape(config["num_attention_heads"], -1, joint.shape[1])
    size = config["qk_nope_head_dim"]
    found = {
        "attn_k_b.weight": np.ascontiguousarray(heads[:, :size].swapaxes(1, 2)),
        "attn_v_b.weight": np.ascontiguousarray(heads[:, size:]),
    }
    bias = layer.get("mlp.gate.e_score_correction_bias")
    return found if bias is None else {**found, "exp_probs_b.bias": bias}


def _deepseek_together(config: Config, layer: Tensors) -> Tensors:
    heads = np.concatenate([layer["attn_k_b.weight"].swapaxes(1, 2), layer["attn_v_b.weight"]], axis=1)
    found = {"self_attn.kv_b_proj.weight": heads.reshape(-1, heads.shape[2])}
    bias = layer.get("exp_probs_b.bias")
    return found if bias is None else {**found, "mlp.gate.e_score_correction_bias": bias}


def _gpt_oss_apart(config: Config, layer: Tensors) -> Tensors:
    gate_up, down = (layer[f"mlp.experts.{each}_proj"].swapaxes(1, 2) for each in ("gate_up", "down"))
    bias = layer["mlp.experts.gate_up_proj_bias"]
    return {
        "attn_sinks.weight": layer["self_attn.sinks"],
        "ffn_gate_exps.weight": np.ascontiguousarray(gate_up[:, ::2]),
        "ffn_up_exps.weight": np.ascontiguousarray(gate_up[:, 1::2]),
        "ffn_down_exps.weight": np.ascontiguousarray(down),
        "ffn_gate_exps.bias": np.ascontiguousarray(bias[:, ::2]),
        "ffn_up_exps.bias": np.ascontiguousarray(bias[:, 1::2]),
        "ffn_down_exps.bias": layer["mlp.experts.down_proj_bias"],
    }


def _gpt_oss_together(config: Config, layer: Tensors) -> Tensors:
    weights = np.stack([layer["ffn_gate_exps.weight"], layer["ffn_up_exps.weight"]], axis=2)
    biases = np.stack([layer["ffn_gate_exps.bias"], layer["ffn_up_exps.bias"]], axis=2)
    num_experts, half, _, width = weights.shape
    return {
        "self_attn.sinks": layer["attn_sinks.weight"],
        "mlp.experts.gate_up_proj": weights.reshape(num_experts, 2 * half, width).swapaxes(1, 2),
        "mlp.experts.gate_up_proj_bias": biases.reshape(num_experts, 2 * half),
        "mlp.experts.down_proj": layer["ffn_down_exps.weight"].swapaxes(1, 2),
        "mlp.experts.down_proj_bias": layer["ffn_down_exps.bias"],
    }


_GRANITE_MLPS = {"block_sparse_moe.input_linear.weight": "exps", "shared_mlp.input_linear.weight": "shexp"}


def _granite_moe_apart(config: Config, layer: Tensors) -> Tensors:
    found: Tensors = {}
    for module, end in _GRANITE_MLPS.items():
        if module in layer:
            gate, up = np.split(layer[module], 2, axis=-2)
            found[f"ffn_gate_{end}.weight"] = np.ascontiguousarray(gate)
            found[f"ffn_up_{end}.weight"] = np.ascontiguousarray(up)
    return found


def _granite_moe_together(config: Config, layer: Tensors) -> Tensors:
    return {
        module: np.concatenate([layer[f"ffn_gate_{end}.weight"], layer[f"ffn_up_{end}.weight"]], axis=-2)
        for module, end in _GRANITE_MLPS.items()
        if f"ffn_gate_{end}.weight" in layer
    }


def _gpt2_apart(config: Config, layer: Tensors) -> Tensors:
    return {
        "attn_qkv.weight": np.ascontiguousarray(layer["attn.c_attn.weight"].T),
        "attn_output.weight": np.ascontiguousarray(layer["attn.c_proj.weight"].T),
        "ffn_up.weight": np.ascontiguousarray(layer["mlp.c_fc.weight"].T),
        "ffn_down.weight": np.ascontiguousarray(layer["mlp.c_proj.weight"].T),
    }


def _gpt2_together(config: Config, layer: Tensors) -> Tensors:
    return {
        "attn.c_attn.weight": layer["attn_qkv.weight"].T,
        "attn.c_proj.weight": layer["attn_output.weight"].T,
        "mlp.c_fc.weight": layer["ffn_up.weight"].T,
        "mlp.c_proj.weight": layer["ffn_down.weight"].T,
    }


def _gpt_neox_apart(config: Config, layer: Tensors) -> Tensors:
    """Return all queries, then all keys, then all values; Hugging Face has those of one head after another."""
    found: Tensors = {}
    for kind in ("weight", "bias"):
        array = layer[f"attention.query_key_value.{kind}"]
        heads = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        found[f"attn_qkv.{kind}"] = np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(array.shape)
    return found


def _gpt_neox_together(config: Config, layer: Tensors) -> Tensors:
    found: Tensors = {}
    for kind in ("weight", "bias"):
        array = layer[f"attn_qkv.{kind}"]
        heads = array.reshape(3, config["num_attention_heads"], -1, *array.shape[1:])
        found[f"attention.query_key_value.{kind}"] = heads.swapaxes(0, 1).reshape(array.shape)
    return found


ARRANGEMENTS: Mapping[str, Arrangement] = {
    "baichuan": Arrangement(_baichuan_apart, _baichuan_together),
    "deepseek2": Arrangement(_deepseek_apart, _deepseek_together),
    "gpt-oss": Arrangement(_gpt_oss_apart, _gpt_oss_together),
    "gpt2": Arrangement(_gpt2_apart, _gpt2_together),
    "gptneox": Arrangement(_gpt_neox_apart, _gpt_neox_together),
    "granitemoe": Arrangement(_granite_moe_apart, _granite_moe_together),
}
"""By ``general.architecture``."""
