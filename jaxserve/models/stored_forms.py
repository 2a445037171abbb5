"""Which weights of a model's checkpoint stay quantized in memory."""

from pathlib import Path

from jax.sharding import SingleDeviceSharding

from checkpoints import CheckpointError, CheckpointReader, is_gguf, open_checkpoint
from checkpoints.quantized.on_load import METHODS
from checkpoints.quantized.reader import quantized_in
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import read_settings
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.weight_forms import DECODED, WeightForms
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.quantized_parts import Rules, quantized_parts
from sharding import own_device


def read_forms(
    config: ModelConfig,
    directory: Path,
    load_format: str = "auto",
    activations: str | None = None,
    rules: Rules | None = None,
) -> WeightForms:
    """Return the quantized tensors of a checkpoint by their names in the model's recipes, or those that are quantized
    while they are loaded.

    A checkpoint that cannot be read is left to ``check_weights``.

    Args:
        config: The model.
        directory: Its checkpoint.
        load_format: As in ``EngineConfig``.
        activations: How rows are rounded that such weights multiply, where the format does not say it.
        rules: How float weights are quantized; None: they are not.

    Raises:
        ConfigError: The rules do not fit the model.
    """
    try:
        is_quantized = is_gguf(directory) or read_settings(directory) is not None
    except CheckpointError:
        return DECODED
    if rules is None and (load_format == "dummy" or not is_quantized):
        return DECODED
    model = abstract_model(config, Scope(), lambda axes: SingleDeviceSharding(own_device()))
    if rules is not None:
        records, methods = quantized_parts(model, rules)
        return WeightForms(records, activations, methods)
    try:
        with open_checkpoint(directory, lambda: model.listings, load_format) as reader:
            return WeightForms(_records(reader, model), activations)
    except CheckpointError:
        return DECODED


def quantizable(config: ModelConfig, directory: Path) -> list[str]:
    """Return the names in a checkpoint of the matrices that can be quantized while they are loaded.

    Raises:
        CheckpointError: It cannot be read.
    """
    model = abstract_model(config, Scope(), lambda axes: SingleDeviceSharding(own_device()))
    with open_checkpoint(directory, lambda: model.listings) as reader:
        named = model.recipes_for(reader.tensors)
    any_method = next(iter(METHODS))
    chosen, _ = quantized_parts(model, Rules({"linear": any_method, "moe": any_method}))
    return [
        own
        for path, param in model.logical.items()
        for (name, _), (own, _) in zip(param.recipe.sources, named[path].sources, strict=True)
        if name in chosen
    ]


def _records(reader: CheckpointReader, model: AbstractModel) -> dict[str, Records]:
    """Return what a checkpoint's quantized tensors hold."""
    quantized = quantized_in(reader)
    if quantized is None:
        return {}
    named = model.recipes_for(reader.tensors)
    found: dict[str, Records] = {}
    for path, param in model.logical.items():
        if param.stored is None:
            continue
        for (name, _), (own, _) in zip(param.recipe.sources, named[path].sources, strict=True):
            tensor = quantized.quantized.get(own)
            records = None if tensor is None or tensor.records is None else tensor.records()
            if records is not None:
                found[name] = records
    return found
