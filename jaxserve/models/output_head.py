"""Find out whether a model has an output head of its own, which config.json alone does not always say."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import SingleDeviceSharding

from checkpoints import CheckpointError, CheckpointReader, Listing, open_checkpoint
from jaxserve.api.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import abstract_model, outline
from jaxserve.models.registry import without_head
from sharding import own_device

logger = logging.getLogger(__name__)

_COMPARED_BYTES = 8 << 20


def choose_head(config: ModelConfig, directory: Path, runner: str = "auto", load_format: str = "auto") -> ModelConfig:
    """Return a model with the head that its checkpoint has and the engine needs.

    An engine for embeddings alone needs no head, and a checkpoint that was saved without one cannot do anything else.
    If the head should be the embedding but the checkpoint has both, with different values, they are two weights, as in
    transformers. A checkpoint that cannot be read is left to ``check_weights``.

    Args:
        config: The model of ``config.json``.
        directory: Its checkpoint.
        runner: The setting of the engine.
        load_format: The setting of the engine.

    Raises:
        ConfigError: ``runner`` is "generate", and the checkpoint has no head.
    """
    if runner == "pooling":
        return without_head(config)
    if config.has_head and load_format != "dummy":
        try:
            with open_checkpoint(directory, model_listings(config), load_format) as reader:
                config = _head_of(reader, config)
        except CheckpointError:
            return config
    if runner == "generate" and not config.has_head:
        raise ConfigError(
            f"runner='generate' needs an output head, but the checkpoint of {config.architecture} was saved without "
            "one (lm_head); use runner='pooling' or 'auto' for embeddings"
        )
    return config


def model_listings(config: ModelConfig) -> Callable[[], Sequence[Listing]]:
    """Return a function that returns the forms in which checkpoints may have a model's tensors."""

    def listings() -> Sequence[Listing]:
        return abstract_model(config, Scope(), lambda axes: SingleDeviceSharding(own_device())).listings

    return listings


def _head_of(reader: CheckpointReader, config: ModelConfig) -> ModelConfig:
    """Return the model with the head that a checkpoint has."""
    module = outline(config, Scope())
    heads = [name for head in module.head_names for name in module.names_of(head) if name in reader.tensors]
    if bool(heads) is not config.tie_embeddings:
        return config
    assert module.embed is not None
    ((embedding, _),) = module.embed.weight.get_metadata()["recipe"].sources
    forms = module.names_of(embedding)
    names = [name for name in forms if name in reader.tensors]
    if not config.tie_embeddings:
        if config.may_share_head:
            return dataclasses.replace(config, tie_embeddings=True)
        is_with_prefix = any(name.startswith(module.optional_prefix) for name in reader.tensors)
        if is_with_prefix or not {*names} <= {forms[1], forms[-1]}:
            return config
        logger.info("The checkpoint was saved without an output head: the engine computes embeddings only")
        return without_head(config)
    if not (names and heads) or _are_equal(reader, names[0], heads[0]):
        return config
    logger.warning(
        "%s and %s differ although tie_word_embeddings is true: both are used, as in transformers", heads[0], names[0]
    )
    return dataclasses.replace(config, tie_embeddings=False)


def _are_equal(reader: CheckpointReader, one: str, other: str) -> bool:
    """Return whether two matrices have the same values; True if their shapes or dtypes differ."""
    shape, dtype = reader.tensors[one].shape, reader.tensors[one].dtype
    if (reader.tensors[other].shape, reader.tensors[other].dtype) != (shape, dtype):
        return True
    step = max(1, _COMPARED_BYTES // max(1, shape[1] * dtype.itemsize))
    for start in range(0, shape[0], step):
        part = (slice(start, min(start + step, shape[0])), slice(0, shape[1]))
        if not np.array_equal(reader.read(one, part).view(np.uint8), reader.read(other, part).view(np.uint8)):
            return False
    return True
