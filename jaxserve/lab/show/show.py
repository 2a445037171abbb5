"""``jaxserve show``: where each weight and each KV page of a model is on a mesh, and the collectives of a layer."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import check_whole
from jaxserve.api.text_files import write_text
from jaxserve.cli_arguments import add_dataclass_arguments, given_arguments
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.devices import Device
from jaxserve.lab.hardware import get_device
from jaxserve.lab.plan.command import SETTINGS
from jaxserve.lab.show.drawing import ShownModel, ShownStage
from jaxserve.lab.show.parts import ModelParts, place
from jaxserve.lab.show.program import MeshModel, model_without_devices
from jaxserve.lab.show.svg import as_svg
from jaxserve.lab.show.text import as_text
from sharding import MESH_AXES


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A model on a mesh: ``print`` it, display it in a notebook, or write ``svg`` to a file.

    Attributes:
        model: Where everything is.
    """

    model: ShownModel

    def __str__(self) -> str:
        """Return the drawing as text."""
        return as_text(self.model)

    @property
    def svg(self) -> str:
        """The drawing as an SVG document."""
        return as_svg(self.model)

    def _repr_html_(self) -> str:
        return self.svg

    def as_dict(self) -> dict[str, Any]:
        """Return the drawing as plain values, for JSON."""
        return self.model.as_dict()


def show(
    model: str | Path,
    *,
    device: str | Device = "h100",
    num_seqs: int = 1,
    num_tokens: int = 2048,
    **settings: Any,
) -> Drawing:
    """Draw where each weight and each KV page of a model is, and the collectives of a layer.

    Only ``config.json`` is read; the devices need not exist. One layer of each kind is traced.

    Args:
        model: As in ``LLM``.
        device: Kind of device, as in :func:`jaxserve.plan`; it determines the kernels and with them the pages.
        num_seqs: Sequences of the decode step, of each replica and of each device with requests of its own.
        num_tokens: Tokens of the prefill step.
        settings: Settings of the engine, such as ``mesh="stage=2,tensor=4"`` and ``layout="sequence_parallel"``.

    Raises:
        ConfigError: A setting is not valid for the model.
    """
    check_whole("num_seqs", num_seqs, 1)
    check_whole("num_tokens", num_tokens, 1)
    split = model_without_devices(EngineConfig.from_arguments(str(model), **settings), get_device(device))
    parts = place(split, _shape(split, num_seqs, 1), _shape(split, 1, num_tokens))
    whole = split.whole
    mesh = dict(zip(map(str, MESH_AXES), split.shape.sizes, strict=True))
    return Drawing(
        ShownModel(
            model=str(model),
            architecture=whole.config.architecture,
            dtype=whole.policy.weights,
            layout=whole.layout.name,
            mesh=mesh,
            stages=_stages(split, parts),
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            where=parts,
        )
    )


def _shape(split: MeshModel, num_rows: int, row_tokens: int) -> BatchShape:
    """Return the shape of a step of rows with equally many tokens."""
    whole = split.whole
    return BatchShape(
        num_tokens=num_rows * row_tokens,
        num_rows=num_rows,
        table_pages=-(-row_tokens // whole.page_size),
        decode_only=row_tokens == 1,
        num_tables=len(whole.kv_layout.windows),
        state_distance=whole.state_distance,
    )


def _stages(split: MeshModel, parts: ModelParts) -> tuple[ShownStage, ...]:
    token_bytes = {layer: kind.pages.token_bytes for kind in parts.kinds for layer in kind.layers}
    return tuple(
        ShownStage(tuple(stage.layers), stage.weight_bytes, sum(token_bytes[layer] for layer in stage.layers))
        for stage in split.stages
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("model", help="model directory, .gguf file, hub id, or demo; its weights are not read")
    parser.add_argument("--device", default="h100", help="kind of device, as in jaxserve plan (default: %(default)s)")
    parser.add_argument("--num-seqs", type=int, default=1, help="sequences of the decode step (default: %(default)s)")
    parser.add_argument(
        "--num-tokens", type=int, default=2048, help="tokens of the prefill step (default: %(default)s)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write the drawing as SVG to a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_dataclass_arguments(parser.add_argument_group("engine"), EngineConfig, SETTINGS)


def run(options: argparse.Namespace) -> None:
    """Print the drawing, and write it as SVG if requested."""
    drawing = show(options.model, **given_arguments(options, ("device", "num_seqs", "num_tokens", *SETTINGS)))
    if options.svg is not None:
        write_text("--svg", options.svg, drawing.svg)
    print(json.dumps(drawing.as_dict()) if options.json else drawing)
