"""The meshes of a number of devices and the layouts that a model can run in on each, with the reasons for the others."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.device.build import find_model, mesh_shape_of
from jaxserve.device.layout_choice import choose_layout
from jaxserve.errors import ConfigError
from jaxserve.lab.hardware import Device
from jaxserve.lab.plan import plan_config
from jaxserve.lab.planned import Plan
from jaxserve.layers.model_config import ModelConfig
from jaxserve.models.loading import read_model_config
from jaxserve.models.sparse_decoder import SparseConfig
from pallas_kernels.registry import UnsupportedKernelError
from sharding import LAYOUTS, MESH_AXES, LayoutError, MeshError, ShardingLayout, get_layout

DEFAULT_LAYOUT = "tensor_parallel"
_EXPERT_RULES = ("experts", "expert_ffn")

logger = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A mesh and a layout.

    Attributes:
        mesh: Such as ``stage=2,tensor=2``; axes of one device are omitted.
        layout: Name of the layout.
        given: The layout, or its name, as an engine takes it.
        plan: Its plan.
    """

    mesh: str
    layout: str
    given: str | ShardingLayout
    plan: Plan

    @property
    def name(self) -> str:
        """Mesh and layout; the layout is omitted where the mesh has nothing to lay out."""
        axes = {axis for axis, size in self.plan.mesh.items() if size > 1}
        return f"{self.mesh} {self.layout}" if axes & {"tensor", "expert"} else self.mesh


class Excluded(NamedTuple):
    """A mesh and a layout that the model cannot run in, and why."""

    mesh: str
    layout: str
    reason: str


class Candidates(NamedTuple):
    """All meshes and layouts of a number of devices.

    Attributes:
        valid: Those that the model can be split in; it need not fit into memory. Layouts that mean the same on a mesh
            are one candidate.
        excluded: The others.
    """

    valid: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...]


def enumerate_candidates(
    model: str,
    num_devices: int,
    device: Device,
    *,
    layouts: Sequence[str | ShardingLayout] | None = None,
    meshes: Sequence[str] | None = None,
    hosts: int = 1,
    context: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Candidates:
    """Plan a model on every mesh of ``num_devices`` devices in every layout.

    Args:
        model: As in :func:`jaxserve.plan`.
        num_devices: Number of devices.
        device: Kind of device.
        layouts: Layouts to try; None: all of the registry.
        meshes: Meshes to try; None: all with as many devices.
        hosts: Hosts that the devices are divided over.
        context: As in :func:`jaxserve.plan`.
        settings: Further settings of the engine.

    Raises:
        ConfigError: The model, a layout or a setting is unknown, or a mesh has another number of devices.
    """
    names: Sequence[str | ShardingLayout] = _ordered() if layouts is None else layouts
    for layout in names:
        if isinstance(layout, str):
            get_layout(layout)
    shapes = [*_meshes(num_devices)] if meshes is None else meshes
    seen: dict[object, str] = {}
    valid, excluded = list[Candidate](), list[Excluded]()
    for mesh in shapes:
        for layout in names:
            name = layout if isinstance(layout, str) else layout.name
            try:
                config = EngineConfig.from_arguments(model, mesh=mesh, layout=layout, **(settings or {}))
                _check_size(config, mesh, num_devices)
                own_model = read_model_config(find_model(config), config.hf_overrides)
                key = _meaning(config, own_model)
                if key in seen:
                    continue
                planned = plan_config(config, device, hosts, context)
            except (LayoutError, MeshError, UnsupportedKernelError, _NotPossibleError) as error:
                excluded.append(Excluded(mesh, name, str(error)))
                continue
            seen[key] = name
            valid.append(Candidate(_shown(mesh), planned.layout, layout, planned))
            logger.info("planned %s", valid[-1].name)
    return Candidates(tuple(valid), tuple(excluded))
