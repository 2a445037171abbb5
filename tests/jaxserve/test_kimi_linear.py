"""Kimi-Linear as it is published: the fields of its config.json, the sizes of its states, and its tensors' names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import load_model
from jaxserve.layers.parallel import Parallel, Scope
from jaxserve.models.abstract import outline
from jaxserve.models.kimi_linear import KimiLinearConfig
from jaxserve.models.registry import config_from_hf
from tests.jaxserve import test_hybrids as hybrids
from tests.jaxserve import test_models as models

ATTENTION = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": ATTENTION,
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 28) if number not in ATTENTION],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""The fields of Kimi-Linear-48B-A3B-Instruct."""


def test_the_published_fields_are_read() -> None:
    found = config_from_hf(PUBLISHED, "config.json")
    assert isinstance(found, KimiLinearConfig)
    assert [index + 1 for index, recurs in enumerate(found.recurrent_layers) if not recurs] == ATTENTION
    assert found.sparse_layers == (False,) + (True,) * 26 and not any(found.rope_layers)
    assert (found.delta_heads, found.delta_dim, found.taps) == (32, 128, 4)
    assert (found.query_rank, found.rank, found.max_positions) == (None, 512, 1048576)
    routing = found.routing
    assert (routing.num_experts, routing.experts_per_token, routing.scale) == (256, 8, 2.446)
    assert routing.is_corrected and routing.is_normalized and found.shared_ffn_size == 1024
    assert found.eos_token_ids == (163586,)


def test_defaults_are_those_of_the_published_model() -> None:
    """Of the class in transformers, which has other layers with attention."""
    named = {name: PUBLISHED[name] for name in ("architectures", "dtype")}
    found, published = (vars(config_from_hf(raw, "config.json")) for raw in (named, PUBLISHED))
    differing = {name for name in found if found[name] != published[name]}
    assert differing == {"recurrent_layers", "has_default_eos"}
    assert [index for index, recurs in enumerate(found["recurrent_layers"]) if not recurs] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("size", [1, 4])
def test_states_are_as_large_as_the_heads_say(size: int) -> None:
    """2 MiB of each layer's matrices, and three inputs of each channel, in float32."""
    config = config_from_hf({**PUBLISHED, "num_hidden_layers": 5} | {"linear_attn_config": None}, "config.json")
    *specs, attention = outline(config, Scope(parallel=Parallel(size=size, heads="tensor"))).state_specs
    assert attention == () and len(specs) == 4
    for spec in specs:
        elements = [int(np.prod(array.shape)) for array in spec]
        assert elements == [3 * 3 * 4096 // size, 32 * 128 * 128 // size]
        assert {array.dtype for array in spec} == {"float32"}


def test_tensors_have_their_published_names(tmp_path: Path) -> None:
    """Published files call the MLP of dense layers otherwise than those that transformers saves."""
    row, tokens = hybrids.ROWS["kimi-linear"], np.arange(20)[None] * 7 % 509
    models.save(hybrids.make_hf(row), row, tmp_path)
    expected = np.asarray(load_model(tmp_path, dtype="float32")(tokens))
    saved = load_file(tmp_path / "model.safetensors")
    published = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): saved[name] for name in saved}
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.block_sparse_moe.experts.5.w2.weight"} <= {*published}
    assert published["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    save_file(published, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    sizes = {"num_heads": raw.pop("linear_num_heads"), "head_dim": raw.pop("linear_head_dim")}
    del raw["layer_types"]
    lists = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "linear_attn_config": {**sizes, **lists}}))
    np.testing.assert_array_equal(load_model(tmp_path, dtype="float32")(tokens), expected)
