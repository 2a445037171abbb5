"""The programs of a model's stages on a mesh whose devices need not exist: enough to trace them, not to run them."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxserve.config import EngineConfig
from jaxserve.device.build import find_model
from jaxserve.device.layout_choice import choose_layout
from jaxserve.device.program import ModelProgram
from jaxserve.device.stage_choice import choose_stages, count_stages
from jaxserve.errors import ConfigError
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.models.abstract import check_tensor_size, outline
from jaxserve.models.loading import read_model_config, resolve_dtype
from jaxserve.models.stages import Stage
from pallas_kernels.registry import load
from sharding import MESH_AXES, MeshShape

_NUM_SLOTS = 8


class MeshPrograms(NamedTuple):
    """A model on a mesh.

    Attributes:
        shape: Devices along each axis of the whole mesh.
        whole: The program of the whole model on the devices of one stage of one data slice.
        stages: The layers of each stage.
    """

    shape: MeshShape
    whole: ModelProgram
    stages: tuple[Stage, ...]


def programs_without_devices(config: EngineConfig) -> MeshPrograms:
    """Return the programs of a model on the mesh of an engine's settings.

    Every place of the mesh is one and the same CPU device, which suffices to trace and to compute shapes. Kernels are
    XLA's, and keys, values and activations have the dtype of the weights, as on GPUs.

    Raises:
        ConfigError: A setting is not valid for the model.
    """
    model = read_model_config(find_model(config), config.hf_overrides)
    num_stages = count_stages(config, model)
    sizes = {"tensor": config.tensor_parallel_size, "expert": config.expert_parallel_size}
    layout = choose_layout(config, model)
    experts = sizes.get(layout.mesh_axis("experts") or "")
    check_tensor_size(model, Parallel.from_layout(layout, sizes["tensor"], experts))
    mesh = _traced_mesh(**sizes)
    layout = layout.on(mesh)
    if config.tensor_parallel_size > 1 and Parallel.on_mesh(layout, mesh).size == 1:
        raise ConfigError(
            f"layout {layout.name!r} does not shard the model; it requires tensor=1, got "
            f"tensor={config.tensor_parallel_size}"
        )
    dtype = resolve_dtype(config.dtype, model, "gpu")
    operation = outline(model, Scope()).kv_specs[0].operation
    whole = ModelProgram(
        config=model,
        mesh=mesh,
        layout=layout,
        policy=DtypePolicy(weights=dtype, activations=dtype, kv=dtype),
        kernel=load(operation, "xla"),
        page_size=config.block_size or 64,
        num_pages=1,
        num_slots=_NUM_SLOTS,
    )
    stages = [
        stage or Stage(0, model.num_layers, model.num_layers) for stage in choose_stages(config, whole, num_stages)
    ]
    return MeshPrograms(MeshShape(data=config.data_parallel_size, stage=num_stages, **sizes), whole, tuple(stages))


def only_layer(program: ModelProgram, layer: int) -> ModelProgram:
    """Return the program of one layer; the first also embeds tokens, the last also samples."""
    return dataclasses.replace(program, stage=Stage(layer, layer + 1, program.config.num_layers))


def _traced_mesh(tensor: int, expert: int) -> Mesh:
    grid = np.empty((1, 1, tensor, expert), dtype=object)
    grid[...] = jax.devices("cpu")[0]
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
