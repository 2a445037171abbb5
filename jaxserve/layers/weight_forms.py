"""Which weights of a checkpoint stay quantized in memory, and in which form."""

import math
from collections.abc import Mapping

from checkpoints import TensorRecipe
from checkpoints.quantized.records import SPANS, Records
from jaxserve.api.errors import ConfigError
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_linear import QuantizedLinear


class WeightForms:
    """The quantized tensors of a checkpoint, which are not decoded: what each holds, by its name in recipes.

    Equal tables are equal and have the same hash, so that modules with the same weights are traced once.

    Args:
        records: What the tensors hold.
        activations: How rows are rounded that such weights multiply, where the format does not say it; see ``Form``.
    """

    def __init__(self, records: Mapping[str, Records] | None = None, activations: str | None = None):
        self._records, self.activations = dict(records or {}), activations
        self._hash = hash((frozenset(self._records.items()), activations))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightForms) or self._hash != other._hash:
            return False
        return self._records == other._records and self.activations == other.activations

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

    def form_of(self, recipe: TensorRecipe, parts: int) -> Form | None:
        """Return the form of a weight; None if it is decoded when it is loaded.

        That is a weight with a source that is not quantized, or not as the others, or has rows of records of another
        axis than the weight's features, or no whole number of records.

        Args:
            recipe: The weight, [outer, inner] in the checkpoint's elements.
            parts: Devices that the features are split over.

        Raises:
            ConfigError: Cutting the features over so many devices would cut a record.
        """
        kinds = {self._records.get(name) for name, _ in recipe.sources}
        records = kinds.pop() if len(kinds) == 1 else None
        if records is None or any(piece.is_transposed != records.is_transposed for piece in recipe.pieces):
            return None
        inner = recipe.shape[1]
        starts = [piece.source_start[-2 if piece.is_transposed else -1] for piece in recipe.pieces]
        starts += [length for piece in recipe.pieces for length in (piece.target_start[1], piece.shape[1])]
        common = math.gcd(records.group or inner, inner, *starts)
        if all(common % span for span in SPANS):
            return None
        span = next((span for span in SPANS if math.gcd(common, inner // parts) % span == 0), None)
        if span is None:
            sizes = [n for n in range(1, parts + 1) if inner % n == 0 and inner // n % SPANS[-1] == 0]
            raise ConfigError(
                f"{recipe.sources[0][0]}: quantized rows of {inner} features cannot be cut into {parts} parts; each "
                f"needs a multiple of {SPANS[-1]}: use {', '.join(map(str, sizes))} devices, or "
                "quantization_config={'weights': 'decoded'}"
            )
        return form_of_records(records, span, self.activations)


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
        table=records.table,
        activations="row" if records.rounds_activations else activations,
    )


DECODED = WeightForms()
"""No weight stays quantized."""
