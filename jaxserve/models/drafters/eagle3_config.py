"""Reads the configuration of an EAGLE-3 head, of the original format or of speculators', and what its tensors say."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints import CheckpointReader, open_checkpoint
from checkpoints.tensor_info import whole_index
from jaxserve.api.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.models.drafters.draft_head import TokenIds
from jaxserve.models.drafters.eagle3 import MASK_STATE, Eagle3Config
from jaxserve.models.drafters.head_files import check_architecture, check_projection
from jaxserve.models.hf_config import ConfigFields, read_config_json
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults(attention_bias=False, mlp_bias=False)
_ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "PEagleDraftModel",
)
_KINDS: Final = ("eagle3", "peagle")
_KIND: Final = "speculators_model_type"
_NORMS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_AUX_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(
    directory: Path, target: ModelConfig, load_format: str = "auto", in_one_pass: bool = False
) -> Eagle3Config:
    """Return the head in a directory, checked against the target that it drafts for.

    Args:
        directory: The head's directory.
        target: The target.
        load_format: As in ``EngineConfig``.
        in_one_pass: Whether the head shall guess all tokens in one pass; one whose config.json says so always does.

    Raises:
        ConfigError: The head is none that is supported, or not one of this target; one error names all keys.
        CheckpointError: Its checkpoint cannot be read.
    """
    path = directory / "config.json"
    raw = read_config_json(path)
    _check_kind(raw, path)
    in_one_pass = in_one_pass or raw.get(_KIND) == "peagle" or raw.get("parallel_drafting") is True
    with open_checkpoint(directory, None, load_format) as reader:
        check_projection(reader.tensors, directory, "EAGLE-3")
        fields = ConfigFields(raw, str(path))
        config = _read(fields, target, reader)
        if in_one_pass:
            config = dataclasses.replace(config, mask_size=_read_mask_size(fields, config, reader))
        fields.raise_problems()
    return config


def _check_kind(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError unless a config.json is that of an EAGLE-3 head of a Llama's layers."""
    kind = raw.get(_KIND, "eagle3")
    if kind not in _KINDS:
        raise ConfigError(f"{path}: {_KIND}: expected {' or '.join(_KINDS)}, got {kind!r}")
    check_architecture(raw, path, _ARCHITECTURES)


def _read(fields: ConfigFields, target: ModelConfig, reader: CheckpointReader) -> Eagle3Config:
    own = fields.nested("transformer_layer_config") if fields.is_given("transformer_layer_config") else fields
    eagle = fields.nested("eagle_config")
    if not eagle.flag("use_aux_hidden_state", True):
        eagle.note("use_aux_hidden_state", "expected true: a head that reads the last layer alone is no EAGLE-3 head")
    base = read_decoder(own, target.architecture, _DEFAULTS)
    base = dataclasses.replace(base, qkv_bias=own.flag("qkv_bias", base.qkv_bias))
    if base.vocab_size != target.vocab_size:
        own.note("vocab_size", f"expected the {target.vocab_size} tokens of {_of(target)}, got {base.vocab_size}")
    has_embedding = "embed_tokens.weight" in reader.tensors
    width = fields.integer("target_hidden_size", base.hidden_size)
    if width != target.hidden_size:
        key = "target_hidden_size" if fields.is_given("target_hidden_size") else "hidden_size"
        fields.note(key, f"expected the {target.hidden_size} features of {_of(target)}, got {width}")
    elif base.hidden_size != width and not has_embedding:
        own.note("hidden_size", f"expected the {width} features of the embedding of {_of(target)}, which it shares")
    flags: dict[str, Any] = {name: fields.flag(name, eagle.flag(name, False)) for name in _NORMS}
    return Eagle3Config(
        **vars(base),
        **flags,
        target_size=width,
        aux_layers=_read_aux_layers(eagle if eagle.is_given(_AUX_LAYERS) else fields, target),
        token_ids=_read_token_ids(fields, base.vocab_size, reader),
        has_embedding=has_embedding,
    )


def _of(target: ModelConfig) -> str:
    return f"the target ({target.architecture})"


def _read_aux_layers(fields: ConfigFields, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, in order: those that are given, or the third, the middle one and
    the third from the end."""
    count = target.num_layers
    given = fields.items(_AUX_LAYERS)
    layers = (2, count // 2, count - 3) if given is None else given
    found = sorted({each for each in layers if isinstance(each, int) and not isinstance(each, bool)})
    if not layers or len(found) < len(layers) or not 0 <= found[0] <= found[-1] < count:
        listed = ", ".join(map(str, layers))
        fields.note(_AUX_LAYERS, f"expected different layers of the {count} of {_of(target)} (from 0), got {listed}")
    return tuple(found)


def _read_mask_size(fields: ConfigFields, config: Eagle3Config, reader: CheckpointReader) -> int | None:
    """Return the features of the state before mask tokens, for a head that guesses all tokens in one pass."""
    sizes = len(config.aux_layers) * config.target_size, config.hidden_size
    info = reader.tensors.get(MASK_STATE)
    if info is not None and info.shape in [(1, size) for size in sizes]:
        return info.shape[1]
    found = "the checkpoint has no such tensor" if info is None else f"got {list(info.shape)}"
    fields.note(
        MASK_STATE,
        f"expected a tensor of shape [1, {sizes[0]}] or [1, {sizes[1]}], {found}; a head needs it to draft all tokens "
        "in one pass (parallel_drafting)",
    )
    return None


def _read_token_ids(fields: ConfigFields, vocab_size: int, reader: CheckpointReader) -> TokenIds | None:
    """Return the target's ids of the head's vocabulary, from the tensor ``d2t`` of differences; None if all are
    equal."""
    count, info = fields.integer("draft_vocab_size", vocab_size), reader.tensors.get("d2t")
    if info is None:
        if count != vocab_size:
            fields.note("draft_vocab_size", f"is {count}, not {vocab_size}, so the checkpoint needs the tensor d2t")
        return None
    if info.shape != (count,) or info.dtype.kind != "i":
        fields.note("d2t", f"expected {count} integers (draft_vocab_size), got {info.dtype} {list(info.shape)}")
        return None
    ids = np.arange(count) + reader.read("d2t", whole_index(info.shape)).astype(np.int64)
    if not (0 <= ids.min() and ids.max() < vocab_size and len(np.unique(ids)) == count):
        fields.note(
            "d2t", f"expected different tokens of the {vocab_size} of the target, got {ids.min()} to {ids.max()}"
        )
        return None
    return TokenIds(ids.tolist(), vocab_size)
