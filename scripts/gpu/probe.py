"""Try the smallest case of every implementation: what does not start at all is known after a minute."""

import functools
from collections.abc import Iterator

import jax

from pallas_kernels.registry import load, operation
from scripts.gpu.compiling import compile_all
from scripts.gpu.figures import Figure
from scripts.gpu.numerics import Check, figures_of
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError, Working
from scripts.gpu.rows import rows

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
# The smallest of each operation in the dtype and sizes of its production tiles.
CASES = {
    "paged_attention": "one_token_bf16_h128",
    "latent_attention": "one_token_bf16_deepseek",
    "qkv_write": "one_token",
    "truncation": "few_tokens",
    "int4_matmul": "rows_1",
    "grouped_matmul": "one_row",
    "linear": "rows_1_bf16",
    "quantized_linear": "w8a8_row",
    "quantized_grouped_matmul": "one_row",
    "argmax": "one_row",
    "delta_net": "wide_bf16",
    "mamba2": "wide_bf16",
    "short_convolution": "ragged_bf16",
}


def items(context: Context) -> list[Item]:
    """List the implementations of each operation, paged attention first."""
    return [Item(f"{name}/{row}", 6.0) for name, row in rows(context.is_tiny)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Compile one case and run it as numerics does."""
    name, row = item.split("/")
    op, case_name, device = operation(name), CASES[name], jax.devices()[0]
    case = op.DEVICE_CASES[case_name]
    reason = load(name, row).unsupported(device.platform, device.device_kind, op.dtype(case), **op.sizes(case))
    if reason is not None:
        raise SkippedError(reason)
    checks = yield from compile_all({case_name: functools.partial(Check, name, row, case_name)})
    yield Working(f"running {name} {case_name} {row}")
    yield from figures_of("probe", name, row, case_name, checks[case_name], context)


def programs(context: Context) -> Iterator[Program]:
    """None that numerics does not have too."""
    yield from ()
