"""Choose which weights stay quantized in memory, and what multiplies by them."""

import dataclasses
import logging
from pathlib import Path

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import check_quantization
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.layers.weight_forms import DECODED, WeightForms
from jaxserve.models.quantized_parts import rules_of
from jaxserve.models.stored_forms import read_forms
from pallas_kernels.registry import load
from sharding.mesh import Device

logger = logging.getLogger(__name__)


def find_forms(config: EngineConfig, model: ModelConfig, directory: Path) -> WeightForms:
    """Return the quantized weights of a model's checkpoint; none if the settings say that they are decoded."""
    settings = check_quantization(config.quantization_config)
    rules = rules_of(settings, config.quantization, directory)
    if settings.weights == "decoded":
        if rules is not None:
            how = f"quantization={config.quantization!r}" if config.quantization else "quantization_config"
            raise ConfigError(
                f"{how} quantizes weights while they are loaded, and quantization_config={{'weights': 'decoded'}} says "
                "that none stay so; leave one of both out"
            )
        return DECODED
    activations = None if settings.activations is None else "group"
    return read_forms(model, directory, config.load_format, activations, rules)


def with_forms(policy: DtypePolicy, config: EngineConfig, device: Device, forms: WeightForms) -> DtypePolicy:
    """Return the policy with the quantized weights that stay so, and the implementation that multiplies by them."""
    where = check_quantization(config.quantization_config).weights
    if not forms or where == "decoded":
        return policy
    reasons = [f"matrix multiplication is by {policy.linear}"]
    if policy.linear == "native":
        native = load("quantized_linear", "native")
        if forms.activations is None and policy.weights == "bfloat16":  # as for weights in bfloat16
            forms = forms.with_activations("bfloat16")
        reasons = forms.unsupported(native, device.platform, device.device_kind)
        if not reasons:
            logger.info("Quantized weights (%s) stay as they are: native kernels", forms)
            return dataclasses.replace(policy, forms=forms, quantized="native")
    if forms.activations is not None and where == "auto" and policy.linear == "native":
        raise ConfigError(f"quantization_config.activations: native kernels cannot round these rows: {reasons[0]}")
    if config.kernels == "native" and (where == "stored" or forms.methods):
        raise ConfigError(f"kernels='native' cannot multiply by the checkpoint's quantized weights: {reasons[0]}")
    if where == "auto" and not forms.methods:
        logger.info("Quantized weights (%s) are decoded: no native kernels for them (%s)", forms, reasons[0])
        return policy
    logger.info("Quantized weights (%s) stay as they are: XLA decodes them in every step, which is slow", forms)
    return dataclasses.replace(policy, forms=forms, quantized="xla")
