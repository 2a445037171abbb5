"""Choose the implementation of each operation for a device, and log it with the reason."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.weight_choice import with_forms
from jaxserve.layers.attention import AttentionKernel, choose_attention
from jaxserve.layers.cpu import has_bfloat16_products
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.layers.weight_forms import DECODED, WeightForms
from jaxserve.models.loading import resolve_dtype
from jaxserve.sampling.sampler import choose_truncation
from pallas_kernels import OPERATIONS, choose, truncation_xla
from pallas_kernels.native_library import unavailable
from pallas_kernels.registry import load
from pallas_kernels.truncation import Truncation
from sharding.mesh import Device

logger = logging.getLogger(__name__)


def attention_sizes(specs: Iterable[KVSpec], parallel: Parallel, page_size: int) -> list[dict[str, int]]:
    """Return the per-device sizes that attention implementations depend on, one entry per kind of layer.

    Args:
        specs: KV cache of each layer.
        parallel: How the model is split.
        page_size: Tokens per page, on all devices that share them.
    """
    parts = parallel.num_token_parts
    shared = {"token_parts": parts} if parts > 1 else {}
    kinds = dict.fromkeys(spec._replace(window=None, reads=None, in_chunks=False, selects_as=None) for spec in specs)
    return [{"page_size": page_size // parts, **shared, **kind.sizes} for kind in kinds]


def attention_operation(architecture: str, specs: Iterable[KVSpec]) -> str:
    """Return the operation that all layers of a model attend with.

    Raises:
        ConfigError: The layers need more than one.
    """
    operations = {spec.operation for spec in specs}
    if len(operations) > 1:
        raise ConfigError(f"{architecture} mixes layers with {' and '.join(sorted(operations))}; expected one")
    return operations.pop()


class _AttentionShapes(NamedTuple):
    """The operation that a model attends with, and the sizes of its kinds of layers."""

    operation: str
    sizes: list[dict[str, int]]

    def unsupported(self, kernel: AttentionKernel, device: Device, dtype: str) -> str | None:
        """Return why an implementation does not support some kind of layer, or None."""
        reasons = (kernel.unsupported(device.platform, device.device_kind, dtype, **layer) for layer in self.sizes)
        return next((reason for reason in reasons if reason is not None), None)


def choose_kernels(
    config: EngineConfig,
    model: ModelConfig,
    specs: Sequence[KVSpec],
    parallel: Parallel,
    device: Device,
    page_size: int,
    forms: WeightForms = DECODED,
) -> tuple[DtypePolicy, AttentionKernel]:
    """Choose the dtypes, the matmul implementation and the attention implementation.

    Args:
        config: The settings.
        model: Configuration of the model.
        specs: KV cache of each of its layers.
        parallel: How it is split.
        device: One of its devices.
        page_size: Tokens per page, on all devices that share them.
        forms: The quantized weights of the checkpoint.

    Raises:
        ConfigError: ``kernels`` names an implementation that lacks a form of the weights.
    """
    widens = config.kernels != "xla" and unavailable() is None
    dtype = resolve_dtype(config.dtype, model, device.platform, has_bfloat16_products() or widens)
    policy = _choose_policy(DtypePolicy.for_platform(dtype, device.platform), device, config.kernels)
    policy = with_forms(policy, config, device, forms)
    attention = _AttentionShapes(
        attention_operation(model.architecture, specs), attention_sizes(specs, parallel, page_size)
    )
    backend = config.attention_backend or config.kernels
    policy = _with_narrow_pages(policy, device, backend, attention)
    return policy, _choose_kernel(device, policy, backend, attention)


def choose_step_truncation(device: Device, backend: str | None, parallel: Parallel) -> Truncation:
    """Choose the implementation of top-k and top-p: ``backend`` if it implements them, else the device's default.

    Only XLA's combines what devices find in their parts of the vocabulary.
    """
    if parallel.keeps_logits:
        logger.info("Top-k and top-p: xla (each device has the logits of its part of the vocabulary)")
        return truncation_xla
    name = "pallas-interpret" if backend == "mosaic-interpret" else backend
    choice = choose_truncation(device, name if name in OPERATIONS["truncation"] else None)
    logger.info("Top-k and top-p: %s (%s)", choice.name, choice.why)
    return cast(Truncation, choice.implementation)


def _choose_kernel(
    device: Device, policy: DtypePolicy, name: str | None, attention: _AttentionShapes
) -> AttentionKernel:
    """Choose one attention implementation that supports all kinds of layers."""
    operation = attention.operation
    choices = [choose_attention(device, policy.kv, name, operation, **each) for each in attention.sizes]
    able = [choice for choice in choices if attention.unsupported(choice.implementation, device, policy.kv) is None]
    choice = able[0] if able else choose_attention(device, policy.kv, "xla", operation, **attention.sizes[0])
    kernel = cast(AttentionKernel, choice.implementation)
    writing = "a separate kernel" if kernel.writer is None else "a kernel fused with normalization and RoPE"
    logger.info("Attention on %s: %s (%s); pages written by %s", device.device_kind, choice.name, choice.why, writing)
    return kernel


def _choose_policy(policy: DtypePolicy, device: Device, kernels: str | None) -> DtypePolicy:
    """Return the policy with the chosen matmul implementation."""
    where = {"platform": device.platform, "device_kind": device.device_kind, "dtype": policy.weights}
    choice = choose("linear", **where, name=kernels)
    logger.info("Matrix multiplication: %s (%s)", choice.name, choice.why)
    grouped = choose("grouped_matmul", **where, name=kernels)
    recurrent = choose("delta_net", **{**where, "dtype": "float32"}, name=kernels)
    return dataclasses.replace(policy, linear=choice.name, grouped=grouped.name, recurrent=recurrent.name)


def _with_narrow_pages(
    policy: DtypePolicy, device: Device, name: str | None, attention: _AttentionShapes
) -> DtypePolicy:
    """Store the keys and values of 16-bit models in that dtype on CPUs too, if native kernels can read it."""
    if device.platform != "cpu" or policy.weights == policy.kv or name not in (None, "native"):
        return policy
    reason = attention.unsupported(load(attention.operation, "native"), device, policy.weights)
    return policy if reason is not None else dataclasses.replace(policy, kv=policy.weights)
