"""The programs of a model's stages on a mesh whose devices need not exist: enough to trace them, not to run them."""

import dataclasses
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.device.build import mesh_shape_of, plan_stages
from jaxserve.device.layout_choice import choose_layout
from jaxserve.device.program import ModelProgram
from jaxserve.lab.devices import Device
from jaxserve.lab.plan import read_model
from jaxserve.models.stages import Stage
from sharding import MeshShape, data_slices, make_mesh, stage_slices


class MeshPrograms(NamedTuple):
    """A model on a mesh.

    Attributes:
        shape: Devices along each axis of the whole mesh.
        whole: The program of the whole model on the devices of one stage of one data slice.
        stages: The program of each stage.
    """

    shape: MeshShape
    whole: ModelProgram
    stages: tuple[ModelProgram, ...]


def programs_without_devices(config: EngineConfig, device: Device) -> MeshPrograms:
    """Return the programs of a model on a mesh of devices of a kind.

    Raises:
        ConfigError: A setting is not valid for the model.
    """
    model = read_model(config)
    shape = mesh_shape_of(config, model)
    mesh = make_mesh(shape, device.planned(shape.num_devices, shape.num_devices))
    layout = choose_layout(config, model)
    stages = plan_stages(config, model, layout, stage_slices(data_slices(mesh)[0])[0]).programs
    return MeshPrograms(shape, dataclasses.replace(stages[0], stage=None), tuple(stages))


def only_layer(program: ModelProgram, layer: int) -> ModelProgram:
    """Return the program of one layer; the first also embeds tokens, the last also samples."""
    return dataclasses.replace(program, stage=Stage(layer, layer + 1, program.config.num_layers))
