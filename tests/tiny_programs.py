"""Tiny random models laid out on virtual devices: one set of checkpoint tensors, cut up for any number of devices."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from jaxserve.engine.steps import ModelProgram
from jaxserve.layers.attention import select_attention
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.models.causal_lm import UnpackedWeight
from jaxserve.models.weights import CheckpointNames, weight_recipes
from jaxserve.sampling.sampler import select_truncation
from pallas_kernels import OPERATIONS
from pallas_kernels.registry import load
from sharding import MeshShape, get_layout, make_mesh

NUM_LAYERS = 2
BACKEND = os.environ.get("TESTS_ATTENTION_BACKEND")  # pytest --attention-backend
KERNEL = select_attention(jax.devices()[0], "float32", BACKEND)
TRUNCATION = select_truncation(jax.devices()[0], BACKEND if BACKEND in OPERATIONS["truncation"] else None)


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers with grouped queries; nothing divides by more devices than it must (the vocabulary by none)."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
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


def make_program(
    config: ModelConfig,
    *,
    tensor: int = 1,
    layout: str = "tensor_parallel",
    num_pages: int = 24,
    num_slots: int = 4,
    policy: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    **settings: Any,
) -> ModelProgram:
    """The model on the first ``tensor`` devices, with pages of 8 tokens; ``settings`` are further fields.

    A policy that names native kernels runs attention natively too.
    """
    mesh = make_mesh(MeshShape(tensor=tensor))
    kernel = load("paged_attention", "native") if policy.linear == "native" else KERNEL
    settings = {"truncation": TRUNCATION} | settings
    return ModelProgram(config, mesh, get_layout(layout).on(mesh), policy, kernel, 8, num_pages, num_slots, **settings)


def random_params(program: ModelProgram, seed: int = 0) -> tuple[jax.Array, ...]:
    """Parameters on the program's devices: the same model for a seed, however many devices there are."""
    recipes = weight_recipes(program.config, CheckpointNames(), program.parallel.size)
    shapes = {name: shape for recipe in recipes.values() for name, shape in recipe.sources}
    generator = np.random.default_rng(seed)
    tensors = {name: generator.normal(0.0, 0.4, shapes[name]).astype(np.float32) for name in sorted(shapes)}
    params = []
    model = program.abstract_model
    for name, struct in model.params.items():
        weight = model.weights.get(name)
        array = np.zeros(struct.shape if weight is None else weight.struct.shape, np.float32)
        for source, source_start, target_start, shape in recipes[name].pieces:
            target = tuple(slice(start, start + size) for start, size in zip(target_start, shape, strict=True))
            box = tuple(slice(start, start + size) for start, size in zip(source_start, shape, strict=True))
            array[target] = tensors[source][box]
        array = array.astype(struct.dtype)
        params.append(jax.device_put(array, struct.sharding) if weight is None else _packed(array, weight, struct))
    return tuple(params)


def _packed(array: np.ndarray, weight: UnpackedWeight, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """A weight as the model keeps it, each device's part packed on its own."""
    plain = jax.device_put(array, weight.struct.sharding)
    shards = [jax.device_put(weight.pack(np.asarray(shard.data)), shard.device) for shard in plain.addressable_shards]
    return jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, shards)
