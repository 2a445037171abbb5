"""Plan the draft model of ``speculative_config``, which has the devices, layout and pages of the model."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Final

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import without_rules
from jaxserve.device.kernel_choice import choose_kernels
from jaxserve.device.sharded_model import Drafter, ShardedModel
from jaxserve.device.weight_choice import find_forms
from jaxserve.layers.kv_layout import KVSpec, attended
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.weight_forms import DECODED
from jaxserve.models.abstract import AbstractModel, check_tensor_size, outline
from jaxserve.models.drafters.dflash import DFlashConfig
from jaxserve.models.drafters.source import find_head
from jaxserve.models.loading import check_weights, find_model_directory, read_model_config, read_model_fields

logger = logging.getLogger(__name__)
_MASK_TOKENS: Final = ("pard_token", "mask_token_id", "ptd_token_id")
"""Keys of the config.json of draft models and heads that guess several tokens in one pass."""


def plan_drafter(config: EngineConfig, sharded: ShardedModel) -> Drafter | None:
    """Return the draft model for a whole model; None if no method of the settings has one.

    Raises:
        ConfigError: It does not fit the model or the devices.
    """
    settings = config.speculative_config
    if settings is None or not config.num_device_drafts:
        return None
    size = settings.get("draft_tensor_parallel_size", config.tensor_parallel_size)
    if size != config.tensor_parallel_size:
        raise ConfigError(
            f"speculative_config.draft_tensor_parallel_size={size}: the draft model runs on the devices of the model; "
            f"expected {config.tensor_parallel_size} (tensor_parallel_size)"
        )
    name, method = settings.get("model", config.model), settings["method"]
    revision = settings.get("revision") if "model" in settings else config.revision
    directory = find_model_directory(name, revision, config.download_dir, config.hf_token, config.load_format)
    own: dict[str, Any] = {"dtype": settings.get("dtype", config.dtype), "speculative_config": None}
    mask_token = None
    if method == "draft_model":
        head, model = None, _read_draft_model(config, name, directory, sharded)
        mask_token = _read_mask_token(name, directory, model) if settings["parallel_drafting"] else None
        specs = tuple(attended(outline(model, Scope(parallel=sharded.parallel)).kv_specs))
        own |= {"quantization": None, "quantization_config": without_rules(config.quantization_config)}
        forms = find_forms(dataclasses.replace(config, **own), model, directory)
    else:
        in_one_pass = settings.get("parallel_drafting", False)
        head = find_head(method, directory, sharded.config, config.load_format, in_one_pass)
        model, own["dtype"] = head.config, sharded.policy.weights
        if head.in_one_pass:
            own_mask = model.mask_token if isinstance(model, DFlashConfig) else None
            mask_token = _read_mask_token(name, directory, model) if own_mask is None else own_mask
        specs, forms = head.outline(Scope(parallel=sharded.parallel)).kv_specs, DECODED
    policy, kernel = choose_kernels(
        dataclasses.replace(config, **own),
        model,
        specs,
        sharded.parallel,
        sharded.mesh.devices.flat[0],
        sharded.page_size,
        forms,
    )
    what = model.architecture if head is None else f"{method} head"
    logger.info("Draft model: %s, %s; attention: %s", what, policy, kernel.name)
    drafter = dataclasses.replace(
        sharded,
        config=model,
        policy=policy,
        kernel=kernel,
        layout=dataclasses.replace(sharded.layout, residual="replicated"),
        processors=(),
        counts_expert_tokens=False,
        num_drafts=0,
        is_drafter=True,
        head=head,
    )
    is_greedy = settings["draft_sample_method"] == "greedy"
    return Drafter(drafter, directory, _table(name, specs, sharded), is_greedy, mask_token)


def check_drafter(drafter: Drafter, model: AbstractModel, load_format: str) -> None:
    """Compare the drafter's checkpoint with the tensors that it needs; ``model`` is the whole model.

    Raises:
        ConfigError: The model's checkpoint has no MTP layer.
        CheckpointError: Files or tensors are missing, damaged, unexpected or of the wrong shape.
    """
    own, head = drafter.sharded.abstract_model, drafter.sharded.head
    if head is None:
        check_weights(drafter.directory, own, load_format)
    else:
        head.check(own, lambda: model.listings)


def _read_draft_model(config: EngineConfig, name: str, directory: Path, sharded: ShardedModel) -> ModelConfig:
    """Return the draft model in a directory, checked against the model that it drafts for."""
    model = read_model_config(directory)
    if model.vocab_size != sharded.config.vocab_size:
        raise ConfigError(
            f"speculative_config.model: {name} has a vocabulary of {model.vocab_size} tokens, {config.model} one of "
            f"{sharded.config.vocab_size}; a draft model needs the same vocabulary"
        )
    check_tensor_size(model, sharded.parallel)
    if any(outline(model, Scope(parallel=sharded.parallel)).state_specs):
        raise ConfigError(
            f"speculative_config.model: {name} has recurrent layers, whose states would have to go back after a "
            "rejected draft; a draft model needs attention in all layers"
        )
    return model


def _read_mask_token(name: str, directory: Path, model: ModelConfig) -> int:
    """Return the token of a draft model or head that stands for those to come."""
    fields, path = read_model_fields(directory)
    key = next((each for each in _MASK_TOKENS if fields.get(each) is not None), None)
    if key is None:
        raise ConfigError(
            f"speculative_config.parallel_drafting: {name} drafts one token in a pass, as {path} has none of "
            f"{', '.join(_MASK_TOKENS)}; use one that was trained for it (PARD, P-EAGLE), or leave the key out"
        )
    found = fields[key]
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < model.vocab_size:
        raise ConfigError(f"{path}: {key}: expected a token from 0 to {model.vocab_size - 1}, got {found!r}")
    return found


def _table(name: str, specs: tuple[KVSpec, ...], sharded: ShardedModel) -> int:
    """Return the page table of the model that has all tokens that the layers of the draft model see."""
    if any(spec.in_chunks for spec in specs):
        raise ConfigError(f"speculative_config.model: {name} attends within chunks, which no draft model may")
    windows = sharded.kv_layout.windows
    if None in windows:
        return windows.index(None)
    widest = max(window for window in windows if window is not None)
    if all(spec.window is not None and spec.window <= widest for spec in specs):
        return windows.index(widest)
    raise ConfigError(
        f"speculative_config.model: {name} sees more than the latest {widest} tokens, but all layers of "
        f"{sharded.config.architecture} attend within sliding windows, and pages outside of them are freed; use a "
        "draft model with the same window, or a max_model_len up to it"
    )
