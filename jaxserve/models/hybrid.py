"""What families with recurrent layers share: which layers are recurrent, and configs of all kinds of MLPs."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from jaxserve.layers.routing import Routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import Windows, read_layer_list
from jaxserve.models.sparse_decoder import SparseConfig

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
