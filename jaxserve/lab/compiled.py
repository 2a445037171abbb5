"""Steps compiled for a GPU that need not exist, with XLA's device-less path: what they need and communicate."""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh, use_abstract_mesh

from jaxserve.api.errors import ConfigError
from jaxserve.device.compiling import bytes_of
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_hidden, trace_step
from jaxserve.lab.devices import Device
from sharding import MeshShape, make_mesh
from sharding.plan import compiled_collectives

_H200 = Path(__file__).parent / "targets" / "h200.txtpb"
_PAGES = 256  # temporaries do not depend on their number


class _Chip(NamedTuple):
    """What the compiler reads of a chip: the fields of XLA's ``GpuDeviceInfoProto`` of these names."""

    cuda_compute_capability: str
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_core: int
    threads_per_core_limit: int


_HOPPER = "{ major: 9 feature_extension: ACCELERATED_FEATURES }"
_MIB = 1 << 20
_CHIPS = {
    # Shared memory and threads: table of compute capabilities in NVIDIA's CUDA programming guide. The rest: NVIDIA's
    # whitepapers of the Hopper, A100 and AD102 architectures. Pallas-Triton knows these GPUs without a driver.
    "h200": _Chip(_HOPPER, 132, 128, 1.98, 50 * _MIB, 232_448, 233_472, 2048),
    "h100": _Chip(_HOPPER, 132, 128, 1.98, 50 * _MIB, 232_448, 233_472, 2048),
    "a100-80g": _Chip("{ major: 8 }", 108, 64, 1.41, 40 * _MIB, 166_912, 167_936, 2048),
    "a100-40g": _Chip("{ major: 8 }", 108, 64, 1.41, 40 * _MIB, 166_912, 167_936, 2048),
    "rtx4090": _Chip("{ major: 8 minor: 9 }", 128, 128, 2.52, 72 * _MIB, 101_376, 102_400, 1536),
}


class CompiledStep(NamedTuple):
    """A step of a stage as XLA compiled it.

    Attributes:
        temporary_bytes: Temporary bytes on a device, with what a stage hands over.
        collectives: Number of each kind of collective.
    """

    temporary_bytes: int
    collectives: Mapping[str, int]


def compile_step(sharded: ShardedModel, shape: BatchShape, device: Device) -> CompiledStep:
    """Compile a step of a stage for the GPUs of its mesh.

    Args:
        sharded: The stage; its mesh may be of planned devices.
        shape: Batch shape of the step.
        device: Kind of device.

    Raises:
        ConfigError: The device is no GPU of the table, or JAX's CUDA wheels are missing.
    """
    mesh = _mesh(MeshShape(**{axis: sharded.mesh.shape[axis] for axis in ("tensor", "expert")}), device)
    sharded = sharded.placed(mesh, _PAGES)
    with use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX 0.11 on Pallas-Triton; donated arguments that no result can take
        traced = trace_step(sharded, shape, "any") if sharded.is_last else trace_hidden(sharded, shape)
        compiled = traced.lower().compile()
    text = compiled.as_text()
    assert text is not None
    needed = bytes_of(compiled)
    handed_over = 0 if sharded.is_last else needed.outputs
    return CompiledStep(needed.temporary + handed_over, compiled_collectives(text))


def _mesh(shape: MeshShape, device: Device) -> Mesh:
    """Return a mesh of GPUs that need not exist."""
    if device.name not in _CHIPS:
        raise ConfigError(f"device {device.name} cannot be compiled for; known: {', '.join(_CHIPS)}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would look for a driver
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(device), topology=f"1x1x{shape.num_devices}"
        )
    except Exception as error:  # JAX raises several kinds
        raise ConfigError(
            f"compiling for {device.name} needs Python >= 3.12 with jax[cuda13] >= 0.11: {error}; without compiling, "
            "temporaries are modelled"
        ) from error
    return make_mesh(shape, list(found.devices))


def target_config(device: Device) -> str:
    """Return a GPU as XLA's ``GpuTargetConfigProto`` in text form: an H200's, with the fields that differ."""
    fields = {
        "name": f'"{device.device_kind}"',
        "device_description_str": f'"{device.device_kind}"',
        "memory_bandwidth": str(int(device.bytes_per_s)),
        "device_memory_size": str(device.memory_bytes),
        **{name: str(value) for name, value in _CHIPS[device.name]._asdict().items()},
    }
    if device.name not in ("h100", "h200"):
        capability = re.findall(r"\d", fields["cuda_compute_capability"])
        version = ".".join([*capability, "0"][:2])
        fields |= {
            "model_str": f'"sm_{version} {device.name}"',
            "platform_version": f'"Compute Capability {version}"',
        }
    text = _H200.read_text()
    for name, value in fields.items():
        pattern = rf"(?m)^( *{name})(?::? .*)$"
        text, count = re.subn(pattern, lambda found, value=value: _field(found[1], value), text)
        assert count == 1, name
    return text


def _field(name: str, value: str) -> str:
    return f"{name} {value}" if value.startswith("{") else f"{name}: {value}"
