"""Reads the rotary embedding in ``config.json``, in its old and new forms."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, get_args

from jaxserve.layers.model_config import RopeConfig, RopeKind
from jaxserve.models.hf_config import ConfigFields

_MAX_POSITIONS: Final = 2**31 - 1
_KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeDefaults:
    """Defaults of a family's class in transformers for rotary fields that config.json omits.

    Attributes:
        theta: Base of the frequencies.
        original_positions: Positions the model was first trained on; None means ``max_position_embeddings``.
        names: Names of scalings that mean another one in this family.
        is_partial: Whether the family has the field ``partial_rotary_factor``.
        partial_factor: Fraction of a head that is rotated, if the field is missing.
        layer_type: Type of the layers whose rotary embedding is read, where each type has its own (Gemma 3).
    """

    theta: float = 10000.0
    original_positions: int | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_partial: bool = False
    partial_factor: float = 1.0
    layer_type: str | None = None


def longest_context(rope: RopeConfig) -> int:
    """Return the longest context in tokens; as in vLLM, three kinds extend ``max_position_embeddings``."""
    if rope.kind not in ("linear", "dynamic", "yarn"):
        return rope.max_positions
    stretched = (rope.original_max_positions or rope.max_positions) * rope.factor
    return max(rope.max_positions, int(min(stretched, _MAX_POSITIONS)))


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the rotary embedding, whichever of the two names they are under."""
    return fields.nested("rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters")


def with_default_rope(fields: ConfigFields, rope: Mapping[str, Any]) -> ConfigFields:
    """Return the fields, with a rotary embedding if they have none."""
    return fields if fields.is_given("rope_scaling") else fields.with_defaults({"rope_parameters": dict(rope)})


def read_rope(fields: ConfigFields, head_dim: int, defaults: RopeDefaults) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (before).

    Args:
        fields: Fields of config.json, where problems are recorded.
        head_dim: H.
        defaults: Defaults of the family.
    """
    scaling = rope_fields(fields)
    if defaults.layer_type is not None and scaling.is_given(defaults.layer_type):
        scaling = scaling.nested(defaults.layer_type)
    kind = _read_rope_kind(scaling, defaults)
    max_positions = fields.integer("max_position_embeddings")
    share = _read_partial_factor(fields, scaling, defaults)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    fewest = 4 if kind == "dynamic" else 2
    if rotary_dim % 2 or rotary_dim < fewest:
        fields.note("head_dim", f"expected an even number of rotated features, at least {fewest}, got {rotary_dim}")
    theta_source = scaling if scaling.is_given("rope_theta") else fields
    theta = theta_source.number("rope_theta", defaults.theta)
    if theta <= 1.0:
        theta_source.note("rope_theta", f"expected a number above 1, got {theta}")
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        max_positions=max_positions,
    )
    if kind == "proportional":
        return dataclasses.replace(rope, factor=scaling.number("factor", 1.0), rotated_share=share)
    if kind in ("linear", "dynamic"):
        return dataclasses.replace(rope, factor=scaling.number("factor"))
    if kind == "default":
        return rope
    original_source = fields if fields.is_given("original_max_position_embeddings") else scaling
    original = original_source.integer(
        "original_max_position_embeddings", defaults.original_positions or max_positions, minimum=2
    )
    return _read_long_rope(scaling, dataclasses.replace(rope, original_max_positions=original))


def _read_long_rope(scaling: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """Add the parameters of llama3, yarn and longrope.

    A longrope without a factor, or a yarn with a null one, uses the ratio of the extended to the original context.
    """
    if rope.kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            scaling.note("high_freq_factor", f"expected more than low_freq_factor {low}, got {high}")
        return dataclasses.replace(rope, factor=scaling.number("factor"), low_freq_factor=low, high_freq_factor=high)
    stretch = rope.max_positions / (rope.original_max_positions or rope.max_positions)
    is_required = rope.kind == "yarn" and "factor" not in scaling.raw
    factor = scaling.number("factor", None if is_required else stretch)
    is_given = scaling.is_given("attention_factor")
    rope = dataclasses.replace(
        rope, factor=factor, attention_factor=scaling.number("attention_factor") if is_given else None
    )
    if rope.kind == "longrope":
        half = rope.rotary_dim // 2
        short, long = scaling.numbers("short_factor", half), scaling.numbers("long_factor", half)
        return dataclasses.replace(rope, short_factor=short, long_factor=long)
    return dataclasses.replace(
        rope,
        beta_fast=scaling.number("beta_fast", rope.beta_fast),
        beta_slow=scaling.number("beta_slow", rope.beta_slow),
        mscale=scaling.number("mscale", rope.mscale, is_zero_allowed=True),
        mscale_all_dim=scaling.number("mscale_all_dim", rope.mscale_all_dim, is_zero_allowed=True),
        truncate=scaling.flag("truncate", rope.truncate),
    )


def _read_rope_kind(scaling: ConfigFields, defaults: RopeDefaults) -> RopeKind:
    """Read ``rope_type``, formerly ``type``; "mrope" rotates by three positions, which are equal in text."""
    per_layer_type = [name for name, value in scaling.raw.items() if isinstance(value, dict)]
    for name in per_layer_type:
        scaling.note(name, "expected one rotary embedding for all layers, got one for this type of layer")
    field = "rope_type" if scaling.is_given("rope_type") else "type"
    name = scaling.text(field, "default")
    name = {"su": "longrope", "mrope": "default", **defaults.names}.get(name, name)
    for kind in _KINDS:
        if kind == name:
            return kind
    scaling.note(field, f"expected one of {', '.join(_KINDS)}, got {name!r}")
    return "default"


def _read_partial_factor(fields: ConfigFields, scaling: ConfigFields, defaults: RopeDefaults) -> float:
    source = scaling if scaling.is_given("partial_rotary_factor") else fields
    factor = source.number("partial_rotary_factor", defaults.partial_factor)
    if factor > 1.0 or (factor != 1.0 and not defaults.is_partial):
        bound = "at most 1" if defaults.is_partial else "1: this architecture rotates whole heads"
        source.note("partial_rotary_factor", f"expected {bound}, got {factor}")
    return min(factor, 1.0)
