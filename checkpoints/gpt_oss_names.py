"""OpenAI's own names of GPT-OSS, of the folder ``original`` of its repositories, and Hugging Face's for them."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from checkpoints.arranged import View, part, stored, transposed
from checkpoints.errors import CheckpointError
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.reader import CheckpointReader

_OUTSIDE: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
_LAYER: Final = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.sinks": "self_attn.sinks",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight": "mlp.experts.gate_up_proj",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight": "mlp.experts.down_proj",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}
_IN_LAYER: Final = re.compile(r"block\.(\d+)\.(.+)")


def has_original_names(tensors: Collection[str]) -> bool:
    """Return whether tensors have OpenAI's names."""
    return "block.0.attn.qkv.weight" in tensors


def arrange_original(reader: CheckpointReader) -> Mapping[str, View]:
    """Return the tensors of a checkpoint with OpenAI's names in Hugging Face's names and arrangement.

    Raises:
        CheckpointError: Tensors are missing, or do not fit together.
    """
    quantized = reader.quantized if isinstance(reader, QuantizedReader) else {}
    views: dict[str, View] = {}
    for name in reader.tensors:
        in_layer = _IN_LAYER.fullmatch(name)
        if name in _OUTSIDE:
            views[_OUTSIDE[name]] = stored(reader, name)
        elif in_layer and in_layer[2] in _LAYER:
            # MXFP4 is shown transposed already, as Hugging Face's 16-bit checkpoints have it.
            turn = in_layer[2].endswith(("mlp1_weight", "mlp2_weight")) and name not in quantized
            view = stored(reader, name)
            views[f"model.layers.{in_layer[1]}.{_LAYER[in_layer[2]]}"] = transposed(view) if turn else view
        elif in_layer and in_layer[2] in ("attn.qkv.weight", "attn.qkv.bias"):
            views |= _queries_keys_values(reader, int(in_layer[1]), name)
    return views


def _queries_keys_values(reader: CheckpointReader, layer: int, name: str) -> dict[str, View]:
    """Return queries, keys and values, whose heads the sizes of sinks and output projection tell."""
    axis = -2 if name.endswith("weight") else -1
    whole, sinks, out = (
        stored(reader, each) for each in (name, f"block.{layer}.attn.sinks", f"block.{layer}.attn.out.weight")
    )
    num_rows, num_queries = whole.info.shape[axis], out.info.shape[-1]
    num_keys, rest = divmod(num_rows - num_queries, 2)
    if rest or num_keys < 1 or sinks.info.shape != sinks.info.shape[:1] or num_queries % max(sinks.info.shape[0], 1):
        raise CheckpointError(
            f"tensor {name!r} has shape {list(whole.info.shape)}, expected rows of queries, keys and values: "
            f"{out.sources[0]!r} has {num_queries} columns, and {sinks.sources[0]!r} shape {list(sinks.info.shape)}"
        )
    ends = {"q": num_queries, "k": num_queries + num_keys, "v": num_rows}
    starts = {"q": 0, "k": ends["q"], "v": ends["k"]}
    kind = name.rpartition(".")[2]
    prefix = f"model.layers.{layer}.self_attn"
    return {f"{prefix}.{each}_proj.{kind}": part(whole, starts[each], ends[each], axis) for each in "qkv"}
