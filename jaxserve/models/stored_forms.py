"""Which weights of a model's checkpoint stay quantized in memory."""

import re
from pathlib import Path

from jax.sharding import SingleDeviceSharding

from checkpoints import CheckpointError, CheckpointReader, is_gguf, open_checkpoint
from checkpoints.quantized.on_load import METHODS, Method
from checkpoints.quantized.reader import quantized_in
from checkpoints.quantized.records import SPANS, Records
from checkpoints.quantized.settings import read_settings
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.weight_forms import DECODED, WeightForms
from jaxserve.models.abstract import AbstractModel, abstract_model
from sharding import own_device

_IS_ROUTER = re.compile(r"\.(router|shared\.gate)\.")


def read_forms(
    config: ModelConfig,
    directory: Path,
    load_format: str = "auto",
    activations: str | None = None,
    method: str | None = None,
) -> WeightForms:
    """Return the quantized tensors of a checkpoint by their names in the model's recipes, or those that are quantized
    while they are loaded.

    A checkpoint that cannot be read is left to ``check_weights``.

    Args:
        config: The model.
        directory: Its checkpoint.
        load_format: As in ``EngineConfig``.
        activations: How rows are rounded that such weights multiply, where the format does not say it.
        method: What quantizes float weights: one of ``on_load.METHODS``; None: nothing.
    """
    try:
        is_quantized = is_gguf(directory) or read_settings(directory) is not None
    except CheckpointError:
        return DECODED
    if load_format == "dummy" or (method is None and not is_quantized):
        return DECODED
    model = abstract_model(config, Scope(), lambda axes: SingleDeviceSharding(own_device()))
    if method is not None:
        return WeightForms(_made(model, METHODS[method]), activations, method)
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
    chosen = _made(model, next(iter(METHODS.values())))
    return [
        own
        for path, param in model.logical.items()
        for (name, _), (own, _) in zip(param.recipe.sources, named[path].sources, strict=True)
        if name in chosen
    ]


def _made(model: AbstractModel, method: Method) -> dict[str, Records]:
    """Return what the matrices of a model's layers are quantized to; routers and gates, embedding and head stay."""
    found: dict[str, Records] = {}
    for path, param in model.logical.items():
        if param.stored is None or not path.startswith("layers.") or _IS_ROUTER.search(path):
            continue
        inner = param.recipe.shape[1]
        if inner % SPANS[-1]:
            continue
        for piece in param.recipe.pieces:
            found[piece.source] = method.records(inner)._replace(is_transposed=piece.is_transposed)
    return found


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
