"""The formats of quantized weights, one line each, and those that are refused by name."""

from checkpoints.errors import CheckpointError
from checkpoints.quantized.awq import Awq
from checkpoints.quantized.format import Format
from checkpoints.quantized.gptq import Gptq
from checkpoints.quantized.settings import Settings

FORMATS: dict[str, type] = {
    "awq": Awq,
    "gptq": Gptq,
}
"""By the value of ``quant_method``."""


def format_for(settings: Settings) -> Format:
    """Return the format that a quantization section describes.

    Raises:
        CheckpointError: The method is unknown or not supported, or a setting is.
    """
    method = method_of(settings)
    if method not in FORMATS:
        raise settings.error(f"weights quantized with {method} are not supported; supported: {', '.join(FORMATS)}")
    return FORMATS[method](settings)


def method_of(settings: Settings) -> str:
    """Return the name of the method of a section."""
    fields = settings.fields
    method = fields.get("quant_method")
    if isinstance(method, str):
        return method.lower().replace("_", "-") if method.lower() == "compressed_tensors" else method.lower()
    if "group_size" in fields and "bits" in fields:
        return "mlx"
    raise CheckpointError(
        f"{settings.where}: expected quant_method to name the method, got fields {', '.join(sorted(map(str, fields)))}"
    )
