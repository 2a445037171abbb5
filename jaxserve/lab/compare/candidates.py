"""The meshes of a number of devices, and the layouts that a model can run in on each."""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxserve.api.config import EngineConfig, known_settings
from jaxserve.api.config_checks import MESH_FIELDS, parse_mesh
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import mesh_shape_of
from jaxserve.device.layout_choice import choose_layout
from jaxserve.lab.devices import Device
from jaxserve.lab.plan.plan import plan_config, read_model
from jaxserve.lab.plan.planned import Plan
from jaxserve.layers.model_config import ModelConfig
from pallas_kernels.registry import UnsupportedKernelError
from sharding import LAYOUTS, MESH_AXES, LayoutError, ShardingLayout, get_layout

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
    hosts: int | None = None,
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
        hosts: As in :func:`jaxserve.plan`.
        context: As in :func:`jaxserve.plan`.
        settings: Further settings of the engine.

    Raises:
        ConfigError: The model, a layout or a setting is unknown, or a mesh has another number of devices.
    """
    settings = settings or {}
    whole = EngineConfig.from_arguments(model, **settings)
    settings = known_settings(settings)
    own_model = read_model(whole)
    names = registry_layouts() if layouts is None else layouts
    for layout in names:
        if isinstance(layout, str):
            get_layout(layout)
    shapes = [*_meshes(num_devices)] if meshes is None else [_checked(mesh, num_devices) for mesh in meshes]
    seen: set[object] = set()
    valid, excluded = list[Candidate](), list[Excluded]()
    for mesh, layout in itertools.product(shapes, names):
        try:
            config = EngineConfig.from_arguments(model, **{**settings, "mesh": mesh, "layout": layout})
            meaning = _meaning(config, own_model)
            if meaning in seen:
                continue
            planned = plan_config(config, device, hosts, context)
        except (ConfigError, LayoutError, UnsupportedKernelError) as error:
            excluded.append(Excluded(mesh, layout if isinstance(layout, str) else layout.name, str(error)))
            continue
        seen.add(meaning)
        valid.append(Candidate(mesh, planned.layout, layout, planned))
        logger.info("planned %s", valid[-1].name)
    return Candidates(tuple(valid), tuple(excluded))


def registry_layouts() -> list[str]:
    """Return the names of all layouts, the default one first."""
    return sorted(LAYOUTS, key=lambda name: (name != DEFAULT_LAYOUT, name))


def _meshes(num_devices: int) -> Iterator[str]:
    """Yield every mesh with this many devices, the fewest axes first."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    shapes = [sizes for sizes in itertools.product(divisors, repeat=len(MESH_AXES)) if math.prod(sizes) == num_devices]
    for sizes in sorted(shapes, key=lambda sizes: (sum(size > 1 for size in sizes), sizes)):
        yield _written(sizes)


def _written(sizes: Sequence[int]) -> str:
    """Return a mesh without its axes of one device."""
    axes = [f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True) if size > 1]
    return ",".join(axes) or "tensor=1"


def _checked(mesh: str, num_devices: int) -> str:
    """Return a mesh that is given, after checking that it has as many devices as are compared."""
    sizes = parse_mesh(mesh, {})
    found = [sizes[MESH_FIELDS[axis]] for axis in MESH_AXES]
    if math.prod(found) != num_devices:
        raise ConfigError(
            f"mesh={mesh!r} has {math.prod(found)} devices, but {num_devices} are compared; meshes of {num_devices}: "
            f"{'; '.join(_meshes(num_devices))}"
        )
    return _written(found)


def _meaning(config: EngineConfig, model: ModelConfig) -> object:
    """Return what distinguishes a mesh and a layout from others: sizes, and the layout without axes of one device and,
    for a dense model, without rules for experts."""
    sizes = dict(zip(map(str, MESH_AXES), mesh_shape_of(config, model).sizes, strict=True))
    layout = choose_layout(config, model)
    is_dense = not model.has_experts
    rules = {
        logical: axis
        for logical, axis in layout.rules.items()
        if sizes[axis] > 1 and not (is_dense and logical in _EXPERT_RULES)
    }
    keeps = "batch" in rules, layout.block_axis in rules.values(), "vocab" in rules
    choices = (layout.dispatch, layout.residual, layout.logits)
    return (
        tuple(sizes.values()),
        tuple(sorted(rules.items())),
        tuple(choice if kept else None for choice, kept in zip(choices, keeps, strict=True)),
    )
