"""Tiny random models laid out on virtual devices: one set of checkpoint tensors, cut up for any number of devices."""

import copy
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from checkpoints.tensor_info import index_bounds
from jaxserve.device.runner import LocalRunner
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.stage import Stage
from jaxserve.layers.attention import choose_attention
from jaxserve.layers.kv_layout import attended
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.layers.parallel import DtypePolicy, Scope
from jaxserve.layers.routing import Routing
from jaxserve.layers.sparse_mlp import ClampedSwiGLU
from jaxserve.models.abstract import AbstractModel, LogicalParam, outline
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.deepseek_v2 import DeepseekConfig
from jaxserve.models.gpt2 import GPT2Config
from jaxserve.models.gpt_oss import GptOssConfig
from jaxserve.models.sparse_decoder import SparseConfig
from jaxserve.sampling.sampler import select_truncation
from pallas_kernels import OPERATIONS
from pallas_kernels.registry import load
from sharding import MeshShape, get_layout, make_mesh
from tests import switchable
from tests.copied_pieces import copy_piece
from tests.switchable import SwitchableConfig

NUM_LAYERS = 2
BACKEND = os.environ.get("TESTS_ATTENTION_BACKEND")  # pytest --attention-backend
KERNEL = choose_attention(jax.devices()[0], "float32", BACKEND).implementation
TRUNCATION = select_truncation(jax.devices()[0], BACKEND if BACKEND in OPERATIONS["truncation"] else None)


def tiny_config(**changes: Any) -> SwitchableConfig:
    """Two layers with grouped queries; nothing divides by more devices than it must (the vocabulary by none).

    A Llama, unless a change is one that Llama's config has not; tests with such changes use the fixture
    ``switchable_family``.
    """
    is_llama = all(name in DecoderConfig.__dataclass_fields__ for name in changes)
    config = SwitchableConfig(
        architecture="LlamaForCausalLM" if is_llama else switchable.ARCHITECTURE,
        vocab_size=53,
        hidden_size=16,
        num_layers=NUM_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        norm_eps=1e-5,
        max_positions=64,
        rope=RopeConfig(rotary_dim=4, max_positions=64),
        rope_layers=(True,) * NUM_LAYERS,
        sliding_windows=(None,) * NUM_LAYERS,
    )
    return dataclasses.replace(config, **changes)


def sparse_config(**changes: Any) -> SparseConfig:
    """The same sizes with a mixture of experts and a gated shared expert in the second layer."""
    base = tiny_config()
    fields = {name: getattr(base, name) for name in DecoderConfig.__dataclass_fields__}
    fields |= {"architecture": "Qwen2MoeForCausalLM", "qkv_bias": True, "sparse_layers": (False, True)}
    fields |= {"expert_ffn_size": 16, "shared_ffn_size": 40}
    fields["routing"] = Routing(num_experts=8, experts_per_token=3, is_normalized=False)
    return SparseConfig(**{**fields, **changes})


def latent_config(**changes: Any) -> DeepseekConfig:
    """The same sizes with latents, and grouped experts beside a shared one in the second layer."""
    base = sparse_config(
        routing=Routing(
            num_experts=8,
            experts_per_token=3,
            is_normalized=True,
            scoring="sigmoid",
            num_groups=4,
            groups_per_token=2,
            experts_per_group_score=2,
            is_corrected=True,
        )
    )
    fields = {name: getattr(base, name) for name in SparseConfig.__dataclass_fields__}
    fields |= {"architecture": "DeepseekV3ForCausalLM", "qkv_bias": False, "num_kv_heads": 4}
    fields |= {"query_rank": 10, "rank": 12, "plain_dim": 6, "value_dim": 7, "attention_scale": 0.3}
    return DeepseekConfig(**{**fields, "is_interleaved": True, "num_extra_layers": 0, **changes})


def gpt_oss_config(**changes: Any) -> GptOssConfig:
    """The same sizes with attention sinks, and experts with biases in both layers."""
    base = sparse_config()
    fields = {name: getattr(base, name) for name in SparseConfig.__dataclass_fields__}
    fields |= {"architecture": "GptOssForCausalLM", "out_bias": True, "sparse_layers": (True,) * NUM_LAYERS}
    fields |= {"shared_ffn_size": 0, "routing": Routing(num_experts=8, experts_per_token=3, is_normalized=True)}
    return GptOssConfig(**{**fields, "gating": ClampedSwiGLU(alpha=1.702, limit=7.0), **changes})


def gpt2_config() -> GPT2Config:
    """The same sizes with learned positions, layer norms and biases."""
    return GPT2Config(
        architecture="GPT2LMHeadModel",
        vocab_size=53,
        hidden_size=16,
        num_layers=NUM_LAYERS,
        num_heads=4,
        num_kv_heads=4,
        is_transposed=True,
        ffn_size=24,
        norm_eps=1e-5,
        max_positions=64,
        rope=None,
        activation="gelu",
        tie_embeddings=True,
        is_scaled=True,
        is_scaled_by_layer=False,
    )


def make_program(
    config: ModelConfig,
    *,
    tensor: int = 1,
    expert: int = 1,
    layout: str = "tensor_parallel",
    num_pages: int = 24,
    num_slots: int = 4,
    policy: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    **settings: Any,
) -> ShardedModel:
    """The model on the first ``tensor * expert`` devices, with pages of 8 tokens; ``settings`` are further fields.

    A policy that names native kernels runs attention natively too.
    """
    mesh = make_mesh(MeshShape(tensor=tensor, expert=expert))
    found = get_layout(layout).on(mesh)
    operation = attended(outline(config, Scope()).kv_specs)[0].operation
    if operation == "latent_attention" or policy.linear == "native" or found.mesh_axis("tokens"):
        kernel = load(operation, "native" if policy.linear == "native" else "xla")
    else:
        kernel = KERNEL
    settings = {"truncation": TRUNCATION} | settings
    return ShardedModel(config, mesh, found, policy, kernel, 8, num_pages, num_slots, **settings)


def random_params(program: ShardedModel, seed: int = 0) -> tuple[jax.Array, ...]:
    """Parameters on the program's devices: the same model for a seed, however many devices there are."""
    model = program.abstract_model
    shapes = {name: shape for recipe in model.recipes.values() for name, shape in recipe.sources}
    generator = np.random.default_rng(seed)
    tensors = {name: generator.normal(0.0, 0.4, shapes[name]).astype(np.float32) for name in sorted(shapes)}
    arrays: dict[str, jax.Array] = {}
    for param in model.logical.values():
        array = np.zeros(param.struct.shape, np.float32)
        for piece in param.recipe.pieces:
            copy_piece(piece, tensors, array)
        arrays |= _stored(array.astype(param.struct.dtype), param, model)
    return tuple(arrays[path] for path in model.params)


def make_runner(compiled: Stage, params: tuple[jax.Array, ...] | None = None) -> LocalRunner:
    """A runner of a stage that others may share, with random parameters unless some are given."""
    stage = copy.copy(compiled)
    stage.load(random_params(stage.model) if params is None else params)
    return LocalRunner([stage])


def _stored(array: np.ndarray, param: LogicalParam, model: AbstractModel) -> dict[str, jax.Array]:
    """The arrays that a parameter is kept in, each device's part filled on its own."""
    plain = jax.device_put(array, param.struct.sharding)
    shards: dict[str, list[jax.Array]] = {path: [] for path in param.arrays}
    for shard in plain.addressable_shards:
        bounds = index_bounds(shard.index, array.shape)
        for path, part in zip(param.arrays, param.fill(np.asarray(shard.data), bounds), strict=True):
            shards[path].append(jax.device_put(part, shard.device))
    structs = {path: model.params[path] for path in param.arrays}
    return {
        path: jax.make_array_from_single_device_arrays(structs[path].shape, structs[path].sharding, shards[path])
        for path in param.arrays
    }
