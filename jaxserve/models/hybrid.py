"""What families with recurrent layers share: which layers are recurrent, and configs of all kinds of MLPs."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final, cast

from jaxserve.layers.mamba2 import Mamba2Options
from jaxserve.layers.routing import Routing
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import Windows, read_layer_list
from jaxserve.models.sparse_decoder import SparseConfig
from pallas_kernels.mamba2 import Mamba2Sizes, StepLimits

NO_ROUTING: Final = Routing(num_experts=1, experts_per_token=1, is_normalized=False)
"""The routing of a model without experts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(SparseConfig):
    """A decoder-only model with recurrent layers, with or without experts.

    Attributes:
        recurrent_layers: For each layer, whether it is recurrent.
    """

    recurrent_layers: tuple[bool, ...]


def no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Return that no layer has a window; ``layer_types`` says other things in these families."""
    del fields
    return (None,) * num_layers


def read_recurrent_layers(
    fields: ConfigFields, num_layers: int, kinds: Mapping[str, bool], names: Collection[str] = ("layer_types",)
) -> tuple[bool, ...] | None:
    """Return which layers are recurrent; None if config.json has no list of kinds, or an invalid one.

    Args:
        fields: Fields of config.json.
        num_layers: Number of layers.
        kinds: Whether a layer is recurrent, by the entry of the list.
        names: Names that the list may have; the first that is there is read.
    """
    given = next((name for name in names if fields.is_given(name)), None)
    entries = None if given is None else read_layer_list(fields, given, num_layers, tuple(kinds))
    return None if entries is None else tuple(kinds[str(entry)] for entry in entries)


def read_mamba(
    fields: ConfigFields, base: DecoderConfig, num_heads: int, *, inner: int | None = None, **options: Any
) -> tuple[Mamba2Sizes, Mamba2Options]:
    """Return the heads of Mamba-2 layers and their options, from fields that begin with ``mamba_``.

    Args:
        fields: Fields of config.json.
        base: The model.
        num_heads: ``mamba_n_heads`` if that is missing.
        inner: Features of all heads; None: ``mamba_expand`` times the hidden size.
        options: Further options, which replace those of the fields.
    """
    heads = fields.integer("mamba_n_heads", num_heads)
    inner = fields.integer("mamba_expand", 2) * base.hidden_size if inner is None else inner
    if inner % heads:
        fields.note("mamba_n_heads", f"expected a divisor of the {inner} features of the Mamba layers, got {heads}")
    head_dim = max(1, inner // heads)
    if fields.is_given("mamba_d_head") and fields.raw["mamba_d_head"] not in ("auto", head_dim):
        stated = fields.raw["mamba_d_head"]
        fields.note("mamba_d_head", f"expected {head_dim}: {heads} heads have {inner} features; got {stated!r}")
    groups = fields.integer("mamba_n_groups", 1)
    if heads % groups:
        fields.note("mamba_n_groups", f"expected a divisor of the {heads} Mamba heads, got {groups}")
    sizes = Mamba2Sizes(heads, head_dim, groups, fields.integer("mamba_d_state", 256))
    has_bias = fields.flag("mamba_proj_bias", False)
    given: dict[str, Any] = {
        "taps": fields.integer("mamba_d_conv", 4, minimum=2),
        "limits": read_time_limits(fields, "time_step_limit"),
        "norm_eps": base.norm_eps,
        "norm_groups": groups,
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "proj_bias": has_bias,
        "out_bias": has_bias,
    }
    return sizes, Mamba2Options(**{**given, **options})


def read_time_limits(fields: ConfigFields, field: str) -> StepLimits:
    """Return the limits of Mamba's step size; transformers 5 writes the infinite one as an object."""
    values = fields.items(field)
    if values is None:
        return StepLimits()
    numbers = [_as_number(value) for value in values]
    if len(numbers) != 2 or None in numbers:
        fields.note(field, f"expected two numbers, the least and the most, got {list(values)}")
        return StepLimits()
    least, most = (each for each in numbers if each is not None)
    return StepLimits(least, most)


def _as_number(value: object) -> float | None:
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("__float__")
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
