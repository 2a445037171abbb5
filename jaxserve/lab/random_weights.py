"""Checkpoints of random weights for models of which only ``config.json`` exists, to run small models with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import TensorInfo, is_gguf, save_safetensors
from jaxserve.api.errors import ConfigError
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import abstract_model
from jaxserve.models.loading import read_model_config, read_model_fields
from jaxserve.models.text_half import text_fields
from sharding import own_device

MOST_BYTES = 1 << 30
"""Largest checkpoint that is made, in float32."""
_VECTOR_SCALE = 0.5


def has_weights(directory: Path) -> bool:
    """Return whether a model's directory has weights in any format, damaged or not; a GGUF file has."""
    if is_gguf(directory):
        return True
    patterns = ("*.safetensors", "*.bin", "*.index.json", "orbax", "manifest.ocdbt")
    return any(next(directory.glob(pattern), None) is not None for pattern in patterns)


def write_random_checkpoint(
    source: Path, target: Path, overrides: Mapping[str, Any] | None = None, seed: int = 0
) -> int:
    """Write a checkpoint of random float32 tensors for the model of a ``config.json``; the same for a seed.

    Args:
        source: Directory with ``config.json``.
        target: Directory to write.
        overrides: Values that replace those of ``config.json``.
        seed: Seed.

    Returns:
        Bytes of its tensors.

    Raises:
        ConfigError: The tensors have more than ``MOST_BYTES``.
    """
    device = jax.sharding.SingleDeviceSharding(own_device())
    recipes = abstract_model(read_model_config(source, overrides), Scope(), lambda axes: device).recipes
    shapes = dict(sorted(shape for recipe in recipes.values() for shape in recipe.sources))
    num_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"{source} has no weights, and random ones would take {num_bytes / (1 << 30):.1f} GiB in float32, over "
            f"{MOST_BYTES >> 30} GiB; pass a checkpoint with weights or a smaller config.json, or only plan"
        )
    generator = np.random.default_rng(seed)
    arrays = {name: _random(generator, shape) for name, shape in shapes.items()}
    target.mkdir(parents=True, exist_ok=True)
    config = {
        **text_fields(read_model_fields(source)[0], overrides),
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(config))
    save_safetensors(target, [(name, TensorInfo(array.shape, array.dtype), array) for name, array in arrays.items()])
    return num_bytes


def _random(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal values whose matmuls keep the size of their input."""
    scale = _VECTOR_SCALE if len(shape) == 1 else shape[-1] ** -0.5
    return generator.normal(0.0, scale, shape).astype(np.float32)
