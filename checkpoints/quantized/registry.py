"""The formats of quantized weights, one line each, and those that are refused by name."""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from checkpoints.quantized.awq import Awq
from checkpoints.quantized.bitsandbytes import BitsAndBytes
from checkpoints.quantized.compressed_tensors import CompressedTensors
from checkpoints.quantized.float8 import Float8
from checkpoints.quantized.format import Format
from checkpoints.quantized.gguf_stored import StoredGguf
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
    "gguf": StoredGguf,
    "gptq": Gptq,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
}
"""By the value of ``quant_method``."""


class Description(NamedTuple):
    """What users are told about a format.

    Attributes:
        name: Its name.
        methods: Values of ``quant_method``; GGUF files say it themselves, and others have their blocks.
        variants: Those that are read.
        exact: What is computed exactly as the file says, and what is not.
        writers: Tools that write it.
    """

    name: str
    methods: tuple[str, ...]
    variants: str
    exact: str
    writers: str


_ALL: Final = "every weight"
_WEIGHTS: Final = "every weight; activations, which its own engine rounds, stay as they are"
DESCRIPTIONS: Final = (
    Description(
        "GGUF",
        ("gguf",),
        "Q4_0 to Q8_0, Q2_K to Q6_K, IQ1 to IQ4, TQ1_0, TQ2_0, MXFP4, NVFP4, F16, BF16, and mixtures such as Q4_K_M; "
        "split files",
        "every weight, as llama.cpp's reference decodes it; its kernels round activations to 8 bits",
        "llama.cpp, and `jaxserve convert` in safetensors and Orbax",
    ),
    Description("AWQ", ("awq",), "version `gemm`, 4 bits, any group", _ALL, "AutoAWQ, llm-compressor"),
    Description(
        "GPTQ",
        ("gptq", "auto-round"),
        "2, 3, 4, 8 bits; symmetric or not; `desc_act`; v1 and v2; `dynamic`; AutoRound's packing (of AWQ too)",
        _ALL,
        "GPTQModel, AutoGPTQ, AutoRound",
    ),
    Description(
        "compressed-tensors",
        ("compressed-tensors",),
        "packed integers of 1 to 8 bits with or without zeros, int8, FP8, MXFP4, NVFP4, mixed",
        _WEIGHTS,
        "llm-compressor",
    ),
    Description(
        "FP8",
        ("fp8", "fbgemm_fp8"),
        "per tensor, per row, blocks of any size (DeepSeek, Kimi-K2, Qwen3), FBGEMM's",
        _WEIGHTS,
        "the models' authors, FBGEMM",
    ),
    Description(
        "bitsandbytes",
        ("bitsandbytes",),
        "NF4, FP4, each with double quantization or without; int8",
        "every weight; int8 has no outlier columns in 16 bits",
        "transformers",
    ),
    Description(
        "MXFP4",
        ("mxfp4",),
        "GPT-OSS's experts, in Hugging Face's names or OpenAI's own (folder `original`)",
        _ALL,
        "OpenAI",
    ),
    Description("MLX", ("mlx",), "affine, 2 to 8 bits, experts in one tensor", _ALL, "mlx-lm"),
    Description("ModelOpt", ("modelopt", "modelopt_fp4"), "FP8, NVFP4", _WEIGHTS, "NVIDIA"),
)
"""In the order of documents."""

_EXPORTS: Final = "export the model as GPTQ, AWQ, compressed-tensors, FP8 or GGUF, or unquantized"
REFUSED: Final[dict[str, str]] = {
    "aqlm": "codebooks of AQLM",
    "bitnet": "ternary weights of BitNet",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "spqr": "SpQR",
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
