"""Which weights of a checkpoint stay quantized in memory, and in which form."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from checkpoints import Piece, TensorRecipe
from checkpoints.quantized.records import SPANS, Records
from jaxserve.api.errors import ConfigError
from jaxserve.layers.storage import Segment
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_linear import QuantizedLinear


class WeightForms:
    """The quantized tensors of a checkpoint, which are not decoded: what each holds, by its name in recipes.

    Equal tables are equal and have the same hash, so that modules with the same weights are traced once.

    Args:
        records: What the tensors hold.
        activations: How rows are rounded that such weights multiply, where the format does not say it; see ``Form``.
        methods: What quantizes tensors that are floats in the checkpoint, while they are loaded: for each the name of
            one of ``on_load.METHODS``; empty: they are quantized there.
    """

    def __init__(
        self,
        records: Mapping[str, Records] | None = None,
        activations: str | None = None,
        methods: Mapping[str, str] | None = None,
    ):
        self._records, self.activations, self.methods = dict(records or {}), activations, dict(methods or {})
        self._hash = hash((frozenset(self._records.items()), activations, frozenset(self.methods.items())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightForms) or self._hash != other._hash:
            return False
        own, others = ((each.activations, each.methods, each._records) for each in (self, other))
        return own == others

    def with_activations(self, activations: str | None) -> "WeightForms":
        """Return the same weights, multiplied with other rounding where the format does not say it."""
        return WeightForms(self._records, activations, self.methods)

    def __getitem__(self, name: str) -> Records:
        return self._records[name]

    def __bool__(self) -> bool:
        return bool(self._records)

    def __str__(self) -> str:
        if not self._records:
            return "none"
        return ", ".join(sorted({f"{each.values} in groups of {each.group or 'a row'}" for each in self._kinds}))

    @property
    def _kinds(self) -> set[Records]:
        return set(self._records.values())

    def unsupported(self, kernel: QuantizedLinear, platform: str, device_kind: str) -> list[str]:
        """Return the reasons why an implementation cannot multiply by some of these weights."""
        forms = {form_of_records(each, SPANS[0], self.activations) for each in self._kinds}
        reasons = (kernel.unsupported(platform, device_kind, form.values, form=form) for form in forms)
        return sorted({reason for reason in reasons if reason is not None})

    def find(self, recipe: TensorRecipe, parts: tuple[int, int]) -> "QuantizedRows | None":
        """Return how a weight stays quantized; None if it is decoded when it is loaded.

        That is a weight with a source that is not quantized, or has rows of records of another axis than the weight's
        features, or features that records do not divide.

        Args:
            recipe: The weight, [outer, inner] in the checkpoint's elements.
            parts: Devices that outputs and features are split over.

        Raises:
            ConfigError: Cutting the features over these devices would cut a record.
        """
        if not self._records:
            return None
        found = {name: self._records.get(name) for name, _ in recipe.sources}
        kinds = {name: records for name, records in found.items() if records is not None}
        if len(kinds) < len(found) or any(
            kinds[each.source].is_transposed != each.is_transposed for each in recipe.pieces
        ):
            return None
        if any(kinds[each.source].groups is not None and not _is_of_whole_rows(each, recipe) for each in recipe.pieces):
            return None
        span = _span(recipe, kinds, parts[1])
        if span is None:
            return None
        found = _segments(recipe, kinds, span, parts, self.activations)
        if found is None:
            return None
        num_bytes = {name: kind.num_bytes(span) for name, kind in kinds.items()}
        widths = {
            name: kind.order(span, parts[1]).columns.size for name, kind in kinds.items() if kind.groups is not None
        }
        return QuantizedRows(recipe.in_records(span, num_bytes, widths), *zip(*found, strict=True))


class QuantizedRows(NamedTuple):
    """A weight as rows of records.

    Attributes:
        recipe: Of these rows.
        segments: What each device's outputs hold.
        records: The same of the tensors that each segment is made of.
    """

    recipe: TensorRecipe
    segments: tuple[Segment, ...]
    records: tuple[Records, ...]


def _is_of_whole_rows(piece: Piece, recipe: TensorRecipe) -> bool:
    """Return whether a piece has all features of its source and of the weight."""
    width = dict(recipe.sources)[piece.source][-1]
    return not piece.is_transposed and piece.shape[1] == width == recipe.shape[1]


def _span(recipe: TensorRecipe, kinds: Mapping[str, Records], parts: int) -> int | None:
    """Return the features of a record; None if no record can hold them."""
    inner = recipe.shape[1]
    starts = [piece.source_start[-2 if piece.is_transposed else -1] for piece in recipe.pieces]
    starts += [length for piece in recipe.pieces for length in (piece.target_start[1], piece.shape[1])]
    groups = [records.group or inner for records in kinds.values()]
    if all(records.groups is not None for records in kinds.values()):  # sorted features are filled up to records
        groups = [group if group % SPANS[-1] == 0 else SPANS[-1] for group in groups]
        return next(span for span in SPANS if math.gcd(*groups) % span == 0)
    common = math.gcd(inner, *groups, *starts)
    if all(common % span for span in SPANS):
        return None
    for span in SPANS:
        if math.gcd(common, inner // parts) % span == 0:
            return span
    sizes = [n for n in range(1, parts + 1) if inner % n == 0 and inner // n % SPANS[-1] == 0]
    raise ConfigError(
        f"{recipe.sources[0][0]}: quantized rows of {inner} features cannot be cut into {parts} parts; each needs a "
        f"multiple of {SPANS[-1]}: use {', '.join(map(str, sizes))} devices, or "
        "quantization_config={'weights': 'decoded'}"
    )


def _segments(
    recipe: TensorRecipe,
    kinds: Mapping[str, Records],
    span: int,
    parts: tuple[int, int],
    activations: str | None,
) -> list[tuple[Segment, Records]] | None:
    """Return the outputs of each device by what they hold; None if the devices' outputs differ in that."""
    num_local = recipe.shape[0] // parts[0]

    def segment(num_outputs: int, records: Records) -> tuple[Segment, Records]:
        form, num_sorted = form_of_records(records, span, activations), 0
        if records.groups is not None:
            order = records.order(span, parts[1])
            form, num_sorted = form._replace(group=order.group), order.columns.shape[1]
        return Segment(num_outputs, form, num_sorted), records

    if len(set(kinds.values())) == 1:
        return [segment(num_local, next(iter(kinds.values())))]
    each_device: list[list[tuple[Segment, Records]]] = []
    at = 0
    for piece in recipe.pieces:
        if piece.target_start[0] != at or piece.shape[1] != recipe.shape[1] or parts[1] > 1:
            return None
        if at % num_local == 0:
            each_device.append([])
        own, at, found = each_device[-1], at + piece.shape[0], segment(piece.shape[0], kinds[piece.source])
        if own and (own[-1][0].form, own[-1][1].groups) == (found[0].form, found[1].groups):
            own[-1] = segment(own[-1][0].num_outputs + piece.shape[0], found[1])
        else:
            own.append(found)
    is_same = all(each == each_device[0] for each in each_device)
    return each_device[0] if is_same and at == recipe.shape[0] else None


def form_of_records(records: Records, span: int, activations: str | None = None) -> Form:
    """Return the form of a weight.

    Args:
        records: What the tensors hold that it is made of.
        span: Features of a record.
        activations: How rows are rounded that it multiplies, where the format does not say it; see ``Form``.
    """
    return Form(
        records.values,
        span,
        records.group,
        records.scales,
        records.zero,
        records.zeros,
        records.biases,
        records.factors,
        records.factor_group,
        table=records.table,
        activations="row" if records.rounds_activations else activations,
        divides=records.divides,
    )


DECODED = WeightForms()
"""No weight stays quantized."""
