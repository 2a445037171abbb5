"""What a drawing shows: a model on a mesh, its stages, and where everything is."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.lab.show.flow import FlowStep
from jaxserve.lab.show.parts import ModelParts, ShownEnd, ShownLayers
from jaxserve.lab.show.rows import Row, ranges_text, rows_of


class ShownStage(NamedTuple):
    """A pipeline stage.

    Attributes:
        layers: Indices of its layers.
        weight_bytes: Bytes of weights on each of its devices.
        token_bytes: Bytes of KV pages per token on each of its devices.
    """

    layers: tuple[int, ...]
    weight_bytes: int
    token_bytes: int | float


@dataclasses.dataclass(frozen=True)
class ShownModel:
    """Where each weight and each KV page of a model is on a mesh, and the collectives of a layer.

    Attributes:
        model: Directory or name of the model.
        architecture: Its architecture.
        dtype: Element type of weights, activations and KV pages.
        layout: Name of the layout.
        mesh: Devices along each mesh axis.
        stages: The pipeline stages.
        num_seqs: Sequences of the decode step, of each replica or device with its own requests.
        num_tokens: Tokens of the prefill step.
        where: Where everything is.
    """

    model: str
    architecture: str
    dtype: str
    layout: str
    mesh: dict[str, int]
    stages: tuple[ShownStage, ...]
    num_seqs: int
    num_tokens: int
    where: ModelParts

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def title(self) -> str:
        """The model."""
        layers = sum(len(kind.layers) for kind in self.where.kinds)
        return f"{Path(self.model).name}: {self.architecture}, {layers} layers, {self.dtype}"

    @property
    def subtitle(self) -> str:
        """The mesh and the layout."""
        axes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        devices = f"{self.num_devices} devices: " if self.num_devices > 1 else ""
        return f"{devices}{axes}; layout {self.layout}"

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the drawing."""
        notes = []
        if self.mesh["data"] > 1:
            notes.append(
                f"Each of the {self.mesh['data']} replicas (data) has all weights, and pages of its own requests."
            )
        steps = f"decode: {self.num_seqs} sequence{'s' * (self.num_seqs > 1)}; prefill: {self.num_tokens} tokens"
        return [*notes, f"Bytes of a collective are those of its result on each device ({steps})."]

    def parts(self) -> list[tuple[str, list[Row]]]:
        """Return the parts of the model in order, each with a title and its rows."""
        found = [("Before the layers", rows_of(self.where.before))]
        for kind in self.where.kinds:
            found.append((f"Layer{'s' * (len(kind.layers) > 1)} {ranges_text(kind.layers)}", rows_of(kind)))
        return [*found, ("After the layers", rows_of(self.where.after))]

    def devices_of(self, stage: int, data: int | None = None) -> list[int]:
        """Return the numbers of a stage's devices, of one replica or of all."""
        size = self.mesh["tensor"] * self.mesh["expert"]
        firsts = [
            (index * len(self.stages) + stage) * size
            for index in (range(self.mesh["data"]) if data is None else [data])
        ]
        return [first + place for first in firsts for place in range(size)]

    def as_dict(self) -> dict[str, Any]:
        """Return the drawing as plain values, for JSON."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        where = self.where
        devices = [{**stage._asdict(), "devices": self.devices_of(index)} for index, stage in enumerate(self.stages)]
        parts = {"before": _plain(where.before), "after": _plain(where.after)}
        return {**own, "stages": devices, "where": {**parts, "layers": [_plain(kind) for kind in where.kinds]}}


def _plain(part: ShownLayers | ShownEnd) -> dict[str, Any]:
    found: dict[str, Any] = {
        "weights": [{**array._asdict(), "part_bytes": array.part_bytes} for array in part.weights],
        "decode": _plain_steps(part.decode),
        "prefill": _plain_steps(part.prefill),
    }
    if isinstance(part, ShownLayers):
        found |= {"layers": part.layers, "pages": part.pages._asdict()}
    return found


def _plain_steps(steps: Sequence[FlowStep]) -> list[dict[str, Any]]:
    return [
        {"arrays": step.arrays, "collective": None if step.collective is None else step.collective._asdict()}
        for step in steps
    ]
