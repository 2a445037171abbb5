"""Reads the configuration of a DFlash head, and what its tensors say."""

from collections.abc import Container
from pathlib import Path
from typing import Final

from checkpoints import open_checkpoint
from jaxserve.layers.model_config import ModelConfig
from jaxserve.models import qwen3
from jaxserve.models.drafters.dflash import DFlashConfig
from jaxserve.models.drafters.head_files import check_architecture, check_projection
from jaxserve.models.hf_config import ConfigFields, read_config_json

_ARCHITECTURES: Final = ("DFlashDraftModel", "DFlashQwen3ForCausalLM", "Qwen3DFlashModel")
_OTHER_FORMS: Final = ("causal", "use_swa", "attention_sink_bias", "projector_type")


def read_dflash(directory: Path, target: ModelConfig, load_format: str = "auto") -> DFlashConfig:
    """Return the head in a directory, checked against the target that it drafts for.

    Args:
        directory: The head's directory.
        target: The target.
        load_format: As in ``EngineConfig``.

    Raises:
        ConfigError: The head is none that is supported, or not one of this target; one error names all keys.
        CheckpointError: Its checkpoint cannot be read.
    """
    path = directory / "config.json"
    raw = read_config_json(path)
    check_architecture(raw, path, _ARCHITECTURES)
    with open_checkpoint(directory, None, load_format) as reader:
        check_projection(reader.tensors, directory, "DFlash")
        fields = ConfigFields(raw, str(path))
        config = _read(fields, target, reader.tensors)
        fields.raise_problems()
    return config


def _read(fields: ConfigFields, target: ModelConfig, tensors: Container[str]) -> DFlashConfig:
    own, base = fields.nested("dflash_config"), qwen3.config_from_hf(fields, target.architecture)
    of_target = f"of the target ({target.architecture})"
    if base.vocab_size != target.vocab_size:
        fields.note("vocab_size", f"expected the {target.vocab_size} tokens {of_target}, got {base.vocab_size}")
    layers = fields.integer("num_target_layers", target.num_layers)
    if layers != target.num_layers:
        fields.note("num_target_layers", f"expected the {target.num_layers} layers {of_target}, got {layers}")
    if any(window is not None for window in base.sliding_windows):
        fields.note("use_sliding_window", "heads whose layers attend within windows are not supported")
    for key in _OTHER_FORMS:
        if own.raw.get(key):
            own.note(key, f"heads of this form are not supported, got {own.raw[key]!r}")
    has_embedding = "embed_tokens.weight" in tensors
    if base.hidden_size != target.hidden_size and not (has_embedding and "lm_head.weight" in tensors):
        message = f"expected the {target.hidden_size} features {of_target}, whose embedding and head it shares"
        fields.note("hidden_size", f"{message}, got {base.hidden_size}")
    return DFlashConfig(
        **vars(base),
        target_size=target.hidden_size,
        aux_layers=_read_aux_layers(own, target),
        mask_token=_read_mask_token(own, base.vocab_size),
        has_embedding=has_embedding,
        has_output="lm_head.weight" in tensors,
        has_mask_embedding="mask_embedding" in tensors,
    )


def _read_aux_layers(fields: ConfigFields, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: those after ``target_layer_ids``, whose outputs it was trained
    on."""
    given, last = fields.items("target_layer_ids"), target.num_layers - 2
    found = [each for each in given or () if isinstance(each, int) and not isinstance(each, bool)]
    if (
        not found
        or len(found) < len(given or ())
        or found != sorted(set(found))
        or not 0 <= found[0] <= found[-1] <= last
    ):
        expected = f"expected different layers of the target in order, from 0 to {last}"
        fields.note("target_layer_ids", f"{expected} ({target.architecture}), got {given!r}")
        return (1,)
    return tuple(each + 1 for each in found)


def _read_mask_token(fields: ConfigFields, vocab_size: int) -> int:
    found = fields.integer("mask_token_id", minimum=0)
    if found >= vocab_size:
        fields.note("mask_token_id", f"expected a token from 0 to {vocab_size - 1}, got {found}")
    return found
