"""Weights from a checkpoint onto devices, for the engine and for a model on its own in a notebook."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from checkpoints import Stored, check_recipes, load_arrays, open_checkpoint, progress_bar, resolve_model
from jaxserve.config_checks import DTYPES
from jaxserve.errors import ConfigError
from jaxserve.layers.cpu import has_bfloat16_products
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.models.causal_lm import AbstractModel, CausalLM, abstract_model
from jaxserve.models.hf_config import read_config_json
from jaxserve.models.registry import checkpoint_names, config_from_hf
from jaxserve.models.weights import ignored_patterns, weight_recipes

logger = logging.getLogger(__name__)


def load_model(model: str | Path, dtype: str = "auto") -> CausalLM:
    """A model on its own on one device, for a notebook: ``load_model(directory)(tokens)`` gives logits.

    Args:
        model: Hugging Face directory or hub id.
        dtype: As in ``EngineConfig``.

    Raises:
        ConfigError: The model is not one that can run, or not in this type.
        CheckpointError: The checkpoint cannot be read.
    """
    directory = resolve_model(str(model))
    config = read_model_config(directory)
    device = jax.devices()[0]
    policy = DtypePolicy.for_platform(
        resolve_dtype(dtype, config, device.platform, has_bfloat16_products()), device.platform
    )
    abstract = abstract_model(config, Parallel(), policy, lambda axes: SingleDeviceSharding(device))
    return nnx.merge(
        abstract.graphdef, jax.tree.unflatten(abstract.treedef, load_weights(directory, config, abstract, 1))
    )


def read_model_config(directory: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The model that a directory's ``config.json`` describes, with some of its values replaced.

    Raises:
        ConfigError: No readable config.json, or the model is not one that can run.
    """
    path = directory / "config.json"
    return config_from_hf({**read_config_json(path), **(overrides or {})}, str(path))


def check_weights(directory: Path, config: ModelConfig, tensor_size: int) -> None:
    """Compares a checkpoint's list of tensors with the model's, before time is spent on anything else.

    Raises:
        CheckpointError: Files or tensors are missing, damaged, of other shapes, or not the model's.
    """
    names = checkpoint_names(config)
    with open_checkpoint(directory) as reader:
        check_recipes(reader.tensors, weight_recipes(config, names, tensor_size), ignored_patterns(config, names))


def load_weights(directory: Path, config: ModelConfig, model: AbstractModel, tensor_size: int) -> tuple[jax.Array, ...]:
    """Reads a model's parameters onto devices, each packed as soon as it is read.

    Args:
        directory: Where the checkpoint is.
        config: The model.
        model: Its module without values.
        tensor_size: Devices that layers are split over.

    Returns:
        The parameters in the order of ``model.params``.

    Raises:
        CheckpointError: Files or tensors are missing, damaged, of other shapes, or not the model's.
    """
    names = checkpoint_names(config)
    recipes = weight_recipes(config, names, tensor_size)
    params = model.params
    read = {name: weight.struct for name, weight in model.weights.items()}
    read = {name: read.get(name, struct) for name, struct in params.items()}
    mismatched = {name for name in recipes.keys() ^ params.keys()}
    assert not mismatched, f"recipes and module disagree on {sorted(mismatched)}"
    for name, struct in read.items():
        assert struct.shape == recipes[name].shape, f"{name}: module {struct.shape}, recipe {recipes[name].shape}"
    with open_checkpoint(directory) as reader:
        check_recipes(reader.tensors, recipes, ignored_patterns(config, names))
        total = sum(int(np.prod(struct.shape)) * struct.dtype.itemsize for struct in read.values())
        with progress_bar(total) as progress:
            arrays = load_arrays(
                reader,
                {name: recipes[name] for name in params},
                {name: struct.dtype for name, struct in read.items()},
                {name: struct.sharding for name, struct in read.items()},
                cast(Callable[[int, int], None], progress),
                {
                    name: Stored(weight.pack, params[name].shape, params[name].sharding)
                    for name, weight in model.weights.items()
                },
            )
    return tuple(arrays[name] for name in params)


def resolve_dtype(dtype: str, config: ModelConfig, platform: str, has_bfloat16: bool = True) -> str:
    """The type a model's weights are kept in: as asked for, or as the checkpoint says.

    Raises:
        ConfigError: The type is unknown, or the platform does not support it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    dtype = DTYPES[dtype]
    if dtype != "auto":
        if dtype == "float16" and platform == "cpu":
            raise ConfigError("dtype='float16' is not supported on CPUs; expected 'float32', 'bfloat16' or 'auto'")
        return dtype
    if platform != "cpu" or config.dtype == "float32" or (config.dtype == "bfloat16" and has_bfloat16):
        return config.dtype
    logger.info(
        "dtype: this CPU has no fast products of %s, the checkpoint's type; float32 holds it exactly", config.dtype
    )
    return "float32"
