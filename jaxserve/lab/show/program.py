"""The stages of a model on a mesh whose devices need not exist: enough to trace them, not to run them."""

import dataclasses
from typing import NamedTuple

from jaxserve.api.config import EngineConfig
from jaxserve.device.build import find_model, mesh_shape_of, plan_stages
from jaxserve.device.layout_choice import choose_layout
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.weight_choice import find_forms
from jaxserve.lab.devices import Device
from jaxserve.lab.plan.plan import read_model
from jaxserve.models.stages import StageLayers
from sharding import MeshShape, data_slices, make_mesh, stage_slices


class MeshModel(NamedTuple):
    """A model on a mesh.

    Attributes:
        shape: Devices along each axis of the whole mesh.
        whole: The whole model on the devices of one stage of one data slice.
        stages: The model of each stage.
    """

    shape: MeshShape
    whole: ShardedModel
    stages: tuple[ShardedModel, ...]


def model_without_devices(config: EngineConfig, device: Device) -> MeshModel:
    """Return a model and its stages on a mesh of devices of a kind.

    Raises:
        ConfigError: A setting is not valid for the model.
    """
    model = read_model(config)
    shape = mesh_shape_of(config, model)
    mesh = make_mesh(shape, device.planned(shape.num_devices, shape.num_devices))
    layout = choose_layout(config, model)
    forms = find_forms(config, model, find_model(config))
    stages = plan_stages(config, model, layout, stage_slices(data_slices(mesh)[0])[0], forms).models
    return MeshModel(shape, dataclasses.replace(stages[0], stage=None), tuple(stages))


def only_layer(sharded: ShardedModel, layer: int) -> ShardedModel:
    """Return the model of one layer; the first also embeds tokens, the last also samples."""
    return dataclasses.replace(sharded, stage=StageLayers(layer, layer + 1, sharded.config.num_layers))
