"""Loads weights from a checkpoint onto devices, for the engine and for use in a notebook."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from checkpoints import (
    CheckpointError,
    CheckpointReader,
    Listings,
    Stored,
    TensorRecipe,
    check_recipes,
    is_gguf,
    load_arrays,
    open_checkpoint,
    progress_bar,
    resolve_model,
)
from checkpoints.quantized.on_load import METHODS, Made, OnLoadReader
from checkpoints.quantized.planes import Blocks, Planes, Words, pairs_of
from checkpoints.quantized.reader import QuantizedReader, keep_records, quantized_in
from checkpoints.quantized.records import Kept, Records
from checkpoints.quantized.settings import is_openai_config, read_settings
from checkpoints.recipe_check import MAX_LISTED
from jaxserve.api.config_checks import DTYPES
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import SHORT_NAMES
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.layers.cpu import has_bfloat16_products
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Scope
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.dummy_weights import DummyReader
from jaxserve.models.gguf_config import config_of_gguf
from jaxserve.models.hf_config import check_quantized_with, read_config_json
from jaxserve.models.openai_config import fields_of_openai
from jaxserve.models.output_head import choose_head, model_listings
from jaxserve.models.registry import config_from_hf
from jaxserve.models.text_half import text_fields
from pallas_kernels import dequantize_native, records_native
from pallas_kernels.native_library import unavailable
from sharding import own_device

logger = logging.getLogger(__name__)


def load_model(model: str | Path, dtype: str = "auto") -> CausalLM:
    """Load a model on one device, for a notebook: ``load_model(directory)(tokens)`` returns logits.

    Args:
        model: Hugging Face directory, GGUF file, hub id, or "demo" for the bundled demo model.
        dtype: As in ``EngineConfig``.

    Raises:
        ConfigError: The model or the dtype is not supported.
        CheckpointError: The checkpoint cannot be read.
    """
    directory = find_model_directory(str(model))
    config = choose_head(read_model_config(directory), directory)
    device = own_device()
    policy = DtypePolicy.for_platform(
        resolve_dtype(dtype, config, device.platform, has_bfloat16_products()), device.platform
    )
    abstract = abstract_model(config, Scope(policy=policy), lambda axes: SingleDeviceSharding(device))
    return abstract.merge(load_weights(directory, abstract))


def find_model_directory(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
) -> Path:
    """Return the directory of a model, or its GGUF file: a local one, a download of a hub id, or the bundled ``demo``.

    Arguments and errors are those of ``checkpoints.resolve_model``.
    """
    return MODEL_DIRECTORY if model == "demo" else resolve_model(model, revision, download_dir, token, load_format)


def read_model_config(
    directory: Path, overrides: Mapping[str, object] | None = None, quantization: str | None = None
) -> ModelConfig:
    """Return the model that a directory's ``config.json`` or a GGUF file describes.

    Args:
        directory: The model's directory or file.
        overrides: Values that replace those of the description.
        quantization: Method that its weights must be quantized with; None: any.

    Raises:
        ConfigError: No readable configuration, the model is not supported, or its weights are not quantized so.
    """
    if quantization not in (None, "None"):  # on a command line
        check_quantized_with(quantization, directory)
    fields, source = read_model_fields(directory)
    return config_from_hf(text_fields(fields, overrides) if overrides else fields, str(source))


def on_load_method(quantization: str | None, directory: Path) -> str | None:
    """Return what quantizes float weights while they are loaded, one of ``on_load.METHODS``; None: nothing.

    Args:
        quantization: As in ``EngineConfig``; what ``read_model_config`` accepts.
        directory: The model's directory or file.
    """
    method = SHORT_NAMES.get(quantization or "", quantization)
    if method not in METHODS or is_gguf(directory) or read_settings(directory) is not None:
        return None
    return method


def read_model_fields(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the object in a model's ``config.json``, and its file; OpenAI's own, of GPT-OSS, in Hugging Face's words.

    A GGUF file has the same in its metadata; a ``config.json`` beside it that names an architecture takes precedence.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    if not is_gguf(directory):
        path = directory / "config.json"
        fields = read_config_json(path)
        return fields_of_openai(fields) if is_openai_config(fields) else fields, path
    beside = directory.with_name("config.json")
    if beside.is_file():
        fields = read_config_json(beside)
        if fields.get("architectures"):
            logger.info("%s: the model is as %s describes it, not as the metadata of the file do", directory, beside)
            return fields, beside
    return config_of_gguf(directory), directory


def has_openai_config(directory: Path) -> bool:
    """Return whether a directory has OpenAI's own ``config.json`` of GPT-OSS."""
    path = directory / "config.json"
    return path.is_file() and is_openai_config(read_config_json(path))


def known_listings(directory: Path) -> Listings | None:
    """Return the forms in which checkpoints may have a directory's model; None if its config.json has no supported
    model."""
    try:
        return model_listings(read_model_config(directory))
    except ConfigError:
        return None


def check_weights(directory: Path, model: AbstractModel, load_format: str = "auto") -> None:
    """Compare a checkpoint's list of tensors with the whole model's, before any expensive work.

    Raises:
        CheckpointError: Files or tensors are missing, damaged, unexpected or of the wrong shape.
    """
    with _open(directory, model, lambda: model.listings, load_format) as reader:
        recipes = model.recipes_for(reader.tensors)
        check_recipes(reader.tensors, recipes, model.ignored)
        _log_ignored(reader, recipes)
        quantized = quantized_in(reader)
        if quantized is not None:
            quantized.check()
            _log_quantization(quantized)
        elif isinstance(reader, OnLoadReader):
            for method, count in Counter(made.method for made in reader.made.values()).items():
                logger.info("%d weights are quantized while they are loaded: %s", count, method.text)


def _log_ignored(reader: CheckpointReader, recipes: Mapping[str, TensorRecipe]) -> None:
    """Say which tensors of a checkpoint are not the model's, such as those of a vision encoder."""
    needed = {source for recipe in recipes.values() for source, _ in recipe.sources}
    ignored = {name: info for name, info in reader.tensors.items() if name not in needed}
    if ignored:
        modules = sorted({".".join(name.split(".")[:2]) for name in ignored})
        logger.info(
            "%d tensors of the checkpoint (%.2f GiB) are not the language model's and are not loaded: %s",
            len(ignored),
            sum(info.num_bytes for info in ignored.values()) / (1 << 30),
            ", ".join(modules[:MAX_LISTED]),
        )


def _log_quantization(reader: QuantizedReader) -> None:
    """Say what a quantized checkpoint holds and how it is computed."""
    left_out = "; activations, which the format quantizes too, are not" if reader.format.quantizes_activations else ""
    kept = reader.kept
    if kept:
        logger.info("%d weights quantized with %s stay as they are in the file", len(kept), reader.format.name)
    decoded = reader.quantized.keys() - kept.keys()
    if decoded:
        logger.info(
            "%d weights quantized with %s (%.2f GiB) are decoded when they are loaded%s",
            len(decoded),
            reader.format.name,
            reader.num_stored_bytes(decoded) / (1 << 30),
            left_out,
        )


def load_weights(
    directory: Path, model: AbstractModel, whole: Listings | None = None, load_format: str = "auto"
) -> tuple[jax.Array, ...]:
    """Read a model's parameters onto devices, each stored as soon as it is read.

    Args:
        directory: The checkpoint.
        model: The module without values.
        whole: For a stage, forms in which checkpoints have the whole model's tensors; None: it is the whole model, so
            that all tensors of the checkpoint must be read.
        load_format: As in ``EngineConfig``.

    Returns:
        The arrays in the order of ``model.params``.

    Raises:
        CheckpointError: Files or tensors are missing, damaged, unexpected or of the wrong shape.
    """
    logical = model.logical
    with _open(directory, model, whole or (lambda: model.listings), load_format) as reader:
        recipes = model.recipes_for(reader.tensors)
        check_recipes(reader.tensors, recipes, model.ignored if whole is None else [".*"])
        total = sum(int(np.prod(param.struct.shape)) * param.struct.dtype.itemsize for param in logical.values())
        with progress_bar(total) as progress:
            arrays = load_arrays(
                reader,
                recipes,
                {path: param.struct.dtype for path, param in logical.items()},
                {path: param.struct.sharding for path, param in logical.items()},
                cast(Callable[[int, int], None], progress),
                {
                    path: Stored(param.fill, {array: model.params[array] for array in param.arrays})
                    for path, param in logical.items()
                },
            )
    return tuple(arrays[path] for path in model.params)


def _open(directory: Path, model: AbstractModel, listings: Listings, load_format: str) -> CheckpointReader:
    """Open a checkpoint, or random numbers for a model."""
    is_dummy = load_format == "dummy"
    reader = DummyReader(model.listings[0]) if is_dummy else open_checkpoint(directory, listings, load_format)
    recipes = model.recipes_for(reader.tensors)
    quantized, kept = quantized_in(reader), _kept(model, recipes)
    if quantized is not None:
        quantized.decode, quantized.pack = decode, pack
        keep_records(reader, kept)
        return reader
    if not kept:
        return reader
    methods = _methods(model, recipes)
    if not methods.keys() >= kept.keys():
        reader.close()
        raise CheckpointError(f"{directory}: its weights are no longer quantized as when the engine was planned")
    return OnLoadReader(reader, {name: Made(METHODS[methods[name]], each) for name, each in kept.items()})


def _methods(model: AbstractModel, recipes: Mapping[str, TensorRecipe]) -> dict[str, str]:
    """Return what quantizes tensors while they are loaded, by their names in the checkpoint."""
    return {
        own: model.forms.methods[name]
        for path, param in model.logical.items()
        for (name, _), (own, _) in zip(param.recipe.sources, recipes[path].sources, strict=True)
        if name in model.forms.methods
    }


def _kept(model: AbstractModel, recipes: Mapping[str, TensorRecipe]) -> dict[str, Kept]:
    """Return the tensors that a model reads as rows of records, by their names in the checkpoint."""
    kept: dict[str, Kept] = {}
    for path, param in model.logical.items():
        if param.span is None:
            continue
        for (name, _), (own, _) in zip(param.recipe.sources, recipes[path].sources, strict=True):
            parts = 1 if param.stored is None else param.stored.parts[1]
            kept[own] = Kept(model.forms[name], param.span, parts)
    return kept


def decode(planes: Planes, result: np.ndarray) -> None:
    """Write decoded weights into an array, with the native kernel where there is one: the same bits, faster."""
    if result.dtype not in dequantize_native.RESULT_DTYPES or unavailable() is not None:
        planes.decode_into(result)
        return
    codes, blocks = _in_rows(planes)
    dequantize_native.dequantize(result, codes, *planes[1:7], blocks)


def pack(records: Records, planes: Planes, span: int, result: np.ndarray) -> None:
    """Write weights into an array as rows of records, with the native kernel where there is one."""
    if unavailable() is not None:
        records.pack_into(planes, span, result)
        return
    codes, blocks = _in_rows(planes)
    groups = None if planes.columns is None else planes.columns[::span]
    numbers, added = records.numbers(planes), records.added(planes)
    halves = records.values == "uint4"
    records_native.pack(result, codes, blocks, added, halves, span, numbers, planes.rows, groups, planes.order)


def _in_rows(planes: Planes) -> tuple[np.ndarray, Blocks | None]:
    """Return codes in rows, or in rows of blocks, and how these hold them."""
    words = planes.blocks
    if not isinstance(words, Words):
        return planes.codes, words
    codes = records_native.turned(planes.codes, words.places)[words.first : words.first + words.num_rows]
    return codes, pairs_of(len(planes.codes))


def resolve_dtype(dtype: str, config: ModelConfig, platform: str, has_bfloat16: bool = True) -> str:
    """Return the dtype of a model's weights: the requested one, or for "auto" the checkpoint's.

    Raises:
        ConfigError: The dtype is unknown, or the platform does not support it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    dtype = DTYPES[dtype]
    if dtype != "auto":
        if dtype == "float16" and platform == "cpu":
            raise ConfigError("dtype='float16' is not supported on CPUs; use 'float32', 'bfloat16' or 'auto'")
        return dtype
    if platform != "cpu" or config.dtype == "float32" or (config.dtype == "bfloat16" and has_bfloat16):
        return config.dtype
    logger.info(
        "this CPU has no fast %s matmul (the checkpoint's dtype); using float32, which represents it exactly",
        config.dtype,
    )
    return "float32"
