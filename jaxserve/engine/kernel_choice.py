"""Choose the implementation of each operation for a device, and log it with the reason."""

import dataclasses
import logging
from typing import cast

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.layers.attention import choose_attention
from jaxserve.layers.cpu import has_bfloat16_products
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.models.loading import resolve_dtype
from jaxserve.sampling.sampler import choose_truncation
from pallas_kernels import OPERATIONS, PagedAttention, choose
from pallas_kernels.native_library import unavailable
from pallas_kernels.registry import load
from pallas_kernels.truncation import Truncation
from sharding import ShardingLayout
from sharding.mesh import Device

logger = logging.getLogger(__name__)


def heads_per_device(model: ModelConfig, layout: ShardingLayout, mesh: Mesh) -> dict[str, int]:
    """Count the query and KV heads on each device."""
    parallel = Parallel.on_mesh(layout, mesh)
    num_heads, num_kv_heads = parallel.heads_per_device(model.num_heads, model.num_kv_heads)
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads}


def choose_kernels(
    config: EngineConfig, model: ModelConfig, layout: ShardingLayout, mesh: Mesh, page_size: int
) -> tuple[DtypePolicy, PagedAttention]:
    """Choose the element types, with what multiplies by weights, and the implementation of attention."""
    device = mesh.devices.flat[0]
    widens = config.kernels != "xla" and unavailable() is None
    dtype = resolve_dtype(config.dtype, model, device.platform, has_bfloat16_products() or widens)
    policy = _choose_policy(DtypePolicy.for_platform(dtype, device.platform), device, config.kernels)
    sizes = {"page_size": page_size, "head_dim": model.head_dim, **heads_per_device(model, layout, mesh)}
    backend = config.attention_backend or config.kernels
    policy = _with_narrow_pages(policy, device, backend, **sizes)
    return policy, _choose_kernel(device, policy, backend, **sizes)


def choose_step_truncation(device: Device, backend: str | None) -> Truncation:
    """Choose the implementation of top-k and top-p: the one that ``backend`` names, where they have such a one."""
    name = "pallas-interpret" if backend == "mosaic-interpret" else backend
    choice = choose_truncation(device, name if name in OPERATIONS["truncation"] else None)
    logger.info("Top-k and top-p: %s (%s)", choice.name, choice.why)
    return cast(Truncation, choice.implementation)


def _choose_kernel(device: Device, policy: DtypePolicy, name: str | None, **sizes: int) -> PagedAttention:
    """Choose the implementation of attention."""
    choice = choose_attention(device, policy.kv, name, **sizes)
    kernel = cast(PagedAttention, choice.implementation)
    writing = "a call of their own" if kernel.writer is None else "one kernel with norm and rotation"
    logger.info("Attention on %s: %s (%s); pages written by %s", device.device_kind, choice.name, choice.why, writing)
    return kernel


def _choose_policy(policy: DtypePolicy, device: Device, kernels: str | None) -> DtypePolicy:
    """Choose what multiplies by weights; the policy names it."""
    where = {"platform": device.platform, "device_kind": device.device_kind, "dtype": policy.weights}
    choice = choose("linear", **where, name=kernels)
    logger.info("Matrix multiplication: %s (%s)", choice.name, choice.why)
    return dataclasses.replace(policy, linear=choice.name)


def _with_narrow_pages(policy: DtypePolicy, device: Device, name: str | None, **sizes: int) -> DtypePolicy:
    """Keep keys and values of 16-bit models in that type on CPUs too, where native kernels read them."""
    if device.platform != "cpu" or policy.weights == policy.kv or name not in (None, "native"):
        return policy
    reason = load("paged_attention", "native").unsupported("cpu", device.device_kind, policy.weights, **sizes)
    return policy if reason is not None else dataclasses.replace(policy, kv=policy.weights)
