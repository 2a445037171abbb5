"""The architectures of GGUF files that are read: their tensors' names and arrangement, and Hugging Face's.

A row of ``ARCHITECTURES`` maps names; where a file also has matrices in other pieces, a function assembles them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from checkpoints.arranged import View, alternating, joined, part, stacked_rows, stored, transposed
from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_file import Metadata
from checkpoints.reader import CheckpointReader

Arrange = Callable[[CheckpointReader, Metadata], Mapping[str, View]]
"""Returns tensors in Hugging Face's arrangement, by name, from those of a file under the names of a table."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Architecture(NamedTuple):
    """An architecture of GGUF files.

    Attributes:
        hf_class: Its name in Hugging Face's ``config.json``.
        model_type: Its ``model_type`` there.
        layer: Modules of a layer: from the name in the file to that in Hugging Face's checkpoints, where ``{}`` stands
            for the index of an expert.
        is_interleaved: Whether the rows of queries and keys are interleaved.
        norm_offset: What stored norms have added.
        layers: What the names of layers begin with in Hugging Face's checkpoints.
        outside: Modules outside of layers, like ``layer``.
        arrange: Assembles tensors that Hugging Face's checkpoints have in other pieces; None: they have not.
    """

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    is_interleaved: bool = False
    norm_offset: float = 0.0
    layers: str = "model.layers"
    outside: Mapping[str, str] = _OUTSIDE
    arrange: Arrange | None = None


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = {**_ATTENTION, **_MLP}
_AFTER_NORMS = {name: _SANDWICH_NORMS[name] for name in ("post_attention_norm", "post_ffw_norm")}
_OLMO2 = {name: module for name, module in _DENSE.items() if "norm" not in name} | _HEAD_NORMS | _AFTER_NORMS
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_EXPERTS = {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS}

_DEEPSEEK = {
    **{name: module for name, module in _ATTENTION.items() if name not in ("attn_k", "attn_v")},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **_MLP,
    **_EXPERTS,
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GPT_OSS = {
    **{name: module for name, module in _ATTENTION.items() if name != "ffn_norm"},
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GRANITE_MOE = {
    **_ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate_linear",
    "ffn_up_exps": "block_sparse_moe.up_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_GRANITE_SHARED = {
    **_GRANITE_MOE,
    "ffn_gate_shexp": "shared_mlp.gate_linear",
    "ffn_up_shexp": "shared_mlp.up_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _ending(reader: CheckpointReader, end: str) -> list[str]:
    """Return the beginnings of the names of tensors with this end."""
    return [name.removesuffix(end) for name in reader.tensors if name.endswith(end)]


def _baichuan(reader: CheckpointReader, _: Metadata) -> dict[str, View]:
    """Join queries, keys and values to one matrix."""
    return {
        f"{layer}.W_pack.weight": joined([stored(reader, f"{layer}.{each}_proj.weight") for each in "qkv"], -2)
        for layer in _ending(reader, ".q_proj.weight")
    }


def _deepseek(reader: CheckpointReader, _: Metadata) -> dict[str, View]:
    """Assemble the matrix from latents to keys and values, head by head; files from before April 2025 have it whole.
    The part of keys is stored transposed, as the absorbed form of the attention multiplies it."""
    views = {
        f"{gate}.e_score_correction_bias": stored(reader, f"{gate}.e_score_correction.bias")
        for gate in _ending(reader, ".e_score_correction.bias")
    }
    for layer in _ending(reader, ".k_b_proj.weight"):
        name, parts = f"{layer}.kv_b_proj.weight", (f"{layer}.k_b_proj.weight", f"{layer}.v_b_proj.weight")
        keys, values = (stored(reader, each) for each in parts)
        if name in reader.tensors:
            views[name] = stored(reader, name)._replace(sources=(name, *parts))
            continue
        heads = stacked_rows(transposed(keys)), stacked_rows(values)
        views[name] = alternating(heads, (keys.info.shape[2], values.info.shape[1]), -2)
    return views


def _gpt_oss(reader: CheckpointReader, _: Metadata) -> dict[str, View]:
    """Put rows of gate and up of all experts in turn, and transpose the matrices."""
    views = {f"{layer}.sinks": stored(reader, f"{layer}.sinks.weight") for layer in _ending(reader, ".sinks.weight")}
    for experts in _ending(reader, ".down_proj.weight"):
        weights = [stored(reader, f"{experts}.{each}_proj.weight") for each in ("gate", "up", "down")]
        biases = [stored(reader, f"{experts}.{each}_proj.bias") for each in ("gate", "up", "down")]
        views |= {
            f"{experts}.gate_up_proj": transposed(alternating(weights[:2], (1, 1), -2)),
            f"{experts}.gate_up_proj_bias": alternating(biases[:2], (1, 1), -1),
            f"{experts}.down_proj": transposed(weights[2]),
            f"{experts}.down_proj_bias": biases[2],
        }
    return views


def _granite_moe(reader: CheckpointReader, _: Metadata) -> dict[str, View]:
    """Join gate and up of all experts, and those of the shared one."""
    return {
        f"{mlp}.input_linear.weight": joined(
            [stored(reader, f"{mlp}.{each}_linear.weight") for each in ("gate", "up")], -2
        )
        for mlp in _ending(reader, ".gate_linear.weight")
    }


def _gpt2(reader: CheckpointReader, _: Metadata) -> dict[str, View]:
    """Transpose the matrices of layers, which Hugging Face's checkpoints have as [in, out]."""
    ends = (".c_attn.weight", ".c_fc.weight", ".c_proj.weight")
    return {name: transposed(stored(reader, name)) for name in reader.tensors if name.endswith(ends)}


def _gpt_neox(reader: CheckpointReader, metadata: Metadata) -> dict[str, View]:
    """Put the rows of queries, keys and values in turn, head by head; files have all queries first."""
    num_heads = metadata.integer("gptneox.attention.head_count")
    views: dict[str, View] = {}
    for kind, axis in (("weight", -2), ("bias", -1)):
        for layer in _ending(reader, f".query_key_value.{kind}"):
            name = f"{layer}.query_key_value.{kind}"
            whole = stored(reader, name)
            size, rest = divmod(whole.info.shape[axis], 3 * max(num_heads, 1))
            if num_heads < 1 or rest:
                raise CheckpointError(
                    f"{metadata.path}: tensor {name!r} has shape {list(whole.info.shape)}, expected rows of queries, "
                    f"keys and values of {num_heads} heads"
                )
            each = num_heads * size
            views[name] = alternating(
                [part(whole, at * each, (at + 1) * each, axis) for at in range(3)], [size] * 3, axis
            )
    return views


ARCHITECTURES: Mapping[str, Architecture] = {
    "baichuan": Architecture("BaiChuanForCausalLM", "baichuan", _DENSE, is_interleaved=True, arrange=_baichuan),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK, arrange=_deepseek),
    "gemma": Architecture("GemmaForCausalLM", "gemma", _DENSE, norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", {**_DENSE, **_SANDWICH_NORMS}, norm_offset=1.0),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", {**_DENSE, **_SANDWICH_NORMS, **_HEAD_NORMS}, norm_offset=1.0
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS, arrange=_gpt_oss),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2,
        layers="transformer.h",
        outside={
            **{"token_embd": "transformer.wte", "position_embd": "transformer.wpe"},
            **{"output_norm": "transformer.ln_f", "output": "lm_head"},
        },
        arrange=_gpt2,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _GPT_NEOX,
        layers="gpt_neox.layers",
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        arrange=_gpt_neox,
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", _DENSE, is_interleaved=True),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", "granitemoe", _GRANITE_MOE, is_interleaved=True, arrange=_granite_moe
    ),
    "llama": Architecture("LlamaForCausalLM", "llama", _DENSE, is_interleaved=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _OLMO2),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _PHI3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _DENSE),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", {**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**_DENSE, **_HEAD_NORMS}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_EXPERTS),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _DENSE, is_interleaved=True),
}
"""By ``general.architecture``; "llama" is also that of Mistral's models, and of Mixtral, which has experts, "deepseek2"
that of DeepSeek V2, V3 and R1 and of Kimi-K2, and "granitemoe" also that of models with shared experts."""

GRANITE_SHARED = Architecture(
    "GraniteMoeSharedForCausalLM", "granitemoeshared", _GRANITE_SHARED, is_interleaved=True, arrange=_granite_moe
)
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", {**_ATTENTION, **_MIXTRAL_EXPERTS}, is_interleaved=True)
