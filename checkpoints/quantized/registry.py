"""The formats of quantized weights, one line each, and those that are refused by name."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from checkpoints.quantized.awq import Awq
from checkpoints.quantized.bitsandbytes import BitsAndBytes
from checkpoints.quantized.compressed_tensors import CompressedTensors
from checkpoints.quantized.float8 import Float8
from checkpoints.quantized.format import Format
from checkpoints.quantized.gptq import Gptq
from checkpoints.quantized.mlx import Mlx
from checkpoints.quantized.modelopt import ModelOpt
from checkpoints.quantized.mxfp4 import Mxfp4
from checkpoints.quantized.settings import Settings

FORMATS: Final[dict[str, Callable[[Settings], Format]]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gptq": Gptq,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
}
"""By the value of ``quant_method``."""

_EXPORTS: Final = "export the model as GPTQ, AWQ, compressed-tensors, FP8 or GGUF, or unquantized"
REFUSED: Final[dict[str, str]] = {
    "aqlm": "codebooks of AQLM",
    "bitnet": "ternary weights of BitNet",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fp_quant": "FP-Quant",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Methods that are known and not read."""


def format_for(settings: Settings) -> Format:
    """Return the format that a quantization section describes.

    Raises:
        CheckpointError: The method is unknown or not supported, or a setting is.
    """
    method = method_of(settings)
    if method in ("auto-round", "intel/auto-round"):
        method, settings = _auto_round(settings)
    if method in FORMATS:
        return FORMATS[method](settings)
    what = f"weights quantized with {REFUSED.get(method, repr(method))} are not supported"
    raise settings.error(f"{what}; supported: {', '.join(FORMATS)}, auto-round; {_EXPORTS}")


def method_of(settings: Settings) -> str:
    """Return the name of the method of a section.

    Raises:
        CheckpointError: It names none.
    """
    fields = settings.fields
    method = fields.get("quant_method")
    if isinstance(method, str):
        return method.lower().replace("compressed_tensors", "compressed-tensors")
    if "group_size" in fields and "bits" in fields:
        return "mlx"
    names = ", ".join(sorted(map(str, fields)))
    raise settings.error(f"expected quant_method to name the method of quantization, got the fields {names}")


def _auto_round(settings: Settings) -> tuple[str, Settings]:
    """Return the format in which AutoRound packs its weights, and its settings."""
    packing = settings.text("packing_format", "auto_round:auto_gptq")
    own = settings.nested("extra_config").fields
    dynamic = {re.escape(name): value for name, value in own.items() if isinstance(value, Mapping)}
    for method in ("gptq", "awq"):
        if method in packing:
            return method, Settings({**settings.fields, "dynamic": dynamic}, settings.where)
    raise settings.error(
        f"packing_format={packing!r} is not supported; supported: auto_round:auto_gptq, auto_round:auto_awq"
    )
