"""Measure what others reach on the same card.

JAX's own paged attention on the benches of ours, dense attention of cuDNN and PyTorch, and transformers' static-cache
generation.
"""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.operation import Tolerance, compare_rows
from pallas_kernels.paged_attention import BENCHES
from scripts.gpu.ceilings import torch_seconds
from scripts.gpu.compiling import compile_all, compiled_without_autotuning, succeeded
from scripts.gpu.driver import first_line, is_device_lost
from scripts.gpu.figures import Figure, rounded
from scripts.gpu.kernels import make_bench, measure_all
from scripts.gpu.models import config_of, sizes_of
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError, Working
from scripts.gpu.peer_paged_attention import JaxPagedAttention, suited
from scripts.gpu.timing import Rotation, choose_sets, tree_bytes
from scripts.gpu.wrong_results import WrongResultError, require_right

IS_ALONE: bool = True
ENVIRONMENT: dict[str, str] = AS_NEEDED
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


class Shape(NamedTuple):
    """Attention of a layer of Llama-3.1-8B over dense keys and values: as many rows, contexts and query tokens."""

    batch: int
    context: int
    query: int

    @property
    def label(self) -> str:
        """As the paged kernels' benches are named."""
        return f"decode_{self.batch}x{self.context}" if self.query == 1 else f"prefill_{self.query}_of_{self.context}"

    @property
    def num_bytes(self) -> int:
        """Keys, values, queries and results."""
        return 2 * _HEAD_DIM * self.batch * (2 * _KV_HEADS * self.context + 2 * _HEADS * self.query)

    @property
    def flops(self) -> int:
        """What the causal mask leaves."""
        seen = self.query * self.context - self.query * (self.query - 1) // 2
        return 4 * self.batch * _HEADS * _HEAD_DIM * seen


DECODES = (Shape(1, 8192, 1), Shape(8, 8192, 1), Shape(64, 1024, 1), Shape(64, 8192, 1), Shape(256, 1024, 1))
PREFILLS = (Shape(1, 2048, 2048), Shape(1, 8192, 8192))


PAGED = "paged_attention of JAX"
_COMPILE_LIMIT_S = 180.0  # of torch.compile


def items(context: Context) -> list[Item]:
    """List the libraries, each in a process of its own."""
    found = [
        Item(PAGED, 40.0),
        Item("cudnn through JAX", 40.0),
        Item("torch attention", 40.0),
        Item("transformers 1024", 75.0),
    ]
    return found if context.is_quick else [*found, Item("torch flex_attention", 50.0), Item("transformers 8192", 75.0)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Measure one library."""
    if item == PAGED:
        yield from _paged(context)
        return
    if item == "cudnn through JAX":
        yield from _cudnn(context)
        return
    torch = _torch()
    yield Working(f"compiling for {item}", _COMPILE_LIMIT_S)
    if item.startswith("transformers"):
        yield from _transformers(torch, 64 if context.is_tiny else int(item.split()[1]), context)
    else:
        yield from _torch_attention(torch, item == "torch flex_attention", context)


def programs(context: Context) -> Iterator[Program]:
    """List those of JAX."""
    for name in _paged_names(context):
        bench = make_bench("paged_attention", JaxPagedAttention(), name, None, suited)
        assert bench.rotation is not None, bench.reason
        yield Program(f"{PAGED}: {bench.name}", bench.rotation.function, (bench.rotation.struct,))
    for shape in _shapes(context):
        rotation = _rotation(shape)
        yield Program(f"cudnn {shape.label}", rotation.function, (rotation.struct,), needs_wheels=True)


def _paged(context: Context) -> Iterator[Figure | Working]:
    """Measure JAX's Pallas-Triton kernel as one more implementation of the operation, on its decode benches."""
    implementation = JaxPagedAttention(is_interpreted=context.is_tiny)
    device = jax.devices()[0]
    benches = [make_bench("paged_attention", implementation, each, device, suited) for each in _paged_names(context)]
    yield from measure_all("peers", "paged_attention", "of JAX", implementation, benches, context)


def _paged_names(context: Context) -> list[str]:
    if context.is_tiny:
        return ["many_rows"]
    names = [name for name in BENCHES if name.startswith("decode_") and name.endswith("page_64")]
    return names[::3] if context.is_quick else names


def _shapes(context: Context) -> tuple[Shape, ...]:
    if context.is_tiny:
        return (Shape(2, 64, 1), Shape(1, 64, 64))
    return (*DECODES[2:4], PREFILLS[0]) if context.is_quick else (*DECODES, *PREFILLS)


def _figure(library: str, shape: Shape, seconds: float, context: Context, note: str) -> Figure:
    best = context.least_s(shape.num_bytes, shape.flops)
    note = f"{shape.num_bytes / seconds / 1e9:.0f} GB/s, {shape.flops / seconds / 1e12:.1f} TFLOP/s; {note}"
    return Figure.timed("peers", f"{library} {shape.label}", seconds, best, note=note)


# ---------------------------------------------------------------- cuDNN


def _attention(arrays: tuple[jax.Array, jax.Array, jax.Array], is_causal: bool, implementation: Any) -> jax.Array:
    return jax.nn.dot_product_attention(*arrays, is_causal=is_causal, implementation=implementation)


def _rotation(shape: Shape, implementation: str = "cudnn") -> Rotation:
    query = jax.ShapeDtypeStruct((shape.batch, shape.query, _HEADS, _HEAD_DIM), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((shape.batch, shape.context, _KV_HEADS, _HEAD_DIM), jnp.bfloat16)
    call = functools.partial(_attention, is_causal=shape.query > 1, implementation=implementation)
    num_sets = choose_sets(shape.num_bytes, tree_bytes((query, keys, keys, query)))
    assert num_sets is not None, shape
    return Rotation(call, (query, keys, keys), num_sets)


def _cudnn(context: Context) -> Iterator[Figure | Working]:
    rotations = {s: _rotation(s, "xla" if context.is_tiny else "cudnn") for s in _shapes(context)}
    compiled = yield from compile_all({shape.label: rotation.compile for shape, rotation in rotations.items()})
    references = {shape: _rotation(shape, "xla").function for shape in rotations}
    for shape, rotation in rotations.items():

        def make(i: int, struct: Any = rotation.struct) -> Any:
            keys = jax.random.split(jax.random.key(i), len(struct))
            return tuple(jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, struct, strict=True))

        try:
            check = functools.partial(_check_dense, references[shape], make)
            timing = rotation.measure(succeeded(compiled[shape.label]), make, check)
            note = f"dense keys and values, {timing.num_sets} sets in turn"
            yield _figure("cudnn through JAX", shape, timing.seconds, context, note)
        except Exception as error:
            yield _failure("cudnn through JAX", shape.label, error)
            if is_device_lost(error):
                raise


def _check_dense(reference: Callable[[Any], jax.Array], make: Callable[[int], Any], found: jax.Array) -> None:
    """Compare a dense result with XLA's.

    Raises:
        WrongResultError: They differ.
    """
    arrays = make(0)
    expected = compiled_without_autotuning(reference, arrays)(arrays).astype(jnp.float32)
    is_real = np.ones(found.shape[:-1], bool)
    # Both round their weights and results to bfloat16.
    tolerance = Tolerance(2e-2, 1e-3 * _HEAD_DIM**0.5)
    require_right(compare_rows(("attention",), found, expected, is_real, tolerance))


# ---------------------------------------------------------------- PyTorch


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("torch is not installed")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise SkippedError("torch sees no GPU")
    return torch


def _torch_attention(torch: Any, is_flex: bool, context: Context) -> Iterator[Figure]:
    """Scaled dot-product attention by each backend, or flex_attention, in CUDA graphs over rotating sets."""
    backends: dict[str, Callable[..., Any]] = _flex(torch) if is_flex else _backends(torch)
    for shape in _shapes(context):
        held = shape.num_bytes
        num_sets = min(8, choose_sets(shape.num_bytes, held) or 3)
        sets = [_torch_inputs(torch, shape) for _ in range(num_sets)]
        for name, call in backends.items():
            try:
                _check_torch(torch, call, shape, sets[0])
                seconds = graph_seconds(torch, functools.partial(call, shape.query > 1), sets)
                yield _figure(
                    name, shape, seconds, context, f"dense keys and values, {num_sets} sets in turn, in a graph"
                )
            except Exception as error:
                yield _failure(name, shape.label, error)
                if "CUDA error" in str(error):
                    raise
        del sets
        torch.cuda.empty_cache()


def _check_torch(torch: Any, call: Callable[..., Any], shape: Shape, arrays: tuple[Any, Any, Any]) -> None:
    """Compare a result with PyTorch's plain attention in float32.

    Raises:
        WrongResultError: They differ.
    """
    attention, is_causal = importlib.import_module("torch.nn.attention"), shape.query > 1
    with torch.no_grad(), attention.sdpa_kernel([attention.SDPBackend.MATH]):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(array.float() for array in arrays), is_causal=is_causal, enable_gqa=True
        )
        error = torch.linalg.vector_norm(call(is_causal, *arrays).float() - expected, dim=-1)
    worst = float((error / (2e-2 * torch.linalg.vector_norm(expected, dim=-1))).max())
    if not worst <= 1:
        raise WrongResultError(f"not timed: worst row {worst:.2g} of what is allowed")


def _torch_inputs(torch: Any, shape: Shape) -> tuple[Any, Any, Any]:
    def made(heads: int, tokens: int) -> Any:
        return torch.randn(shape.batch, heads, tokens, _HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    return made(_HEADS, shape.query), made(_KV_HEADS, shape.context), made(_KV_HEADS, shape.context)


def _backends(torch: Any) -> dict[str, Callable[..., Any]]:
    attention = importlib.import_module("torch.nn.attention")

    def by(kind: Any, is_causal: bool, query: Any, key: Any, value: Any) -> Any:
        with attention.sdpa_kernel([kind]):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, enable_gqa=True
            )

    def default(is_causal: bool, query: Any, key: Any, value: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    found: dict[str, Callable[..., Any]] = {"torch SDPA, its own choice": default}
    for name, label in (("FLASH_ATTENTION", "torch flash attention"), ("CUDNN_ATTENTION", "torch cuDNN attention")):
        kind = getattr(attention.SDPBackend, name, None)
        if kind is not None:
            found[label] = functools.partial(by, kind)
    return found


def _flex(torch: Any) -> dict[str, Callable[..., Any]]:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    @functools.cache
    def mask_of(tokens: int) -> Any:
        return flex.create_block_mask(causal, None, None, tokens, tokens, device="cuda")

    def call(is_causal: bool, query: Any, key: Any, value: Any) -> Any:
        mask = mask_of(query.shape[2]) if is_causal else None
        return compiled(query, key, value, block_mask=mask, enable_gqa=True)

    return {"torch flex_attention": call}


def graph_seconds(torch: Any, call: Callable[..., Any], sets: list[Any]) -> float:
    """Median seconds of a call inside a CUDA graph that calls it once on each set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            for arrays in sets:
                call(*arrays)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for arrays in sets:
            call(*arrays)
    return torch_seconds(torch, graph.replay) / len(sets)


# ---------------------------------------------------------------- transformers


class TokenTimes:
    """A streamer, as transformers calls what takes tokens: it notes when each came."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """A token (the prompt comes first), waited for."""
        value.cpu()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def _transformers(torch: Any, num_tokens: int, context: Context) -> Iterator[Figure]:
    """Decode time a token of a random Llama-3.1-8B: static cache, which transformers compiles by itself."""
    if importlib.util.find_spec("transformers") is None:
        raise SkippedError("transformers is not installed")
    transformers = importlib.import_module("transformers")
    config = config_of("llama-8b", context.is_tiny)
    model = make_model(torch, transformers, config, "cuda")
    seconds, high = token_seconds(torch, model, num_tokens, 64, "cuda")
    sizes = sizes_of(config)
    best = context.least_s(sizes.read_bytes + num_tokens * sizes.kv_bytes)
    note = f"median of the last tokens, 90 % within {high * 1e3:.3f}; generate(cache_implementation='static'), which "
    note += "compiles the step with torch.compile; each token is waited for"
    yield Figure(
        part="peers",
        name=f"transformers {transformers.__version__}: llama-8b decode, batch 1, context {num_tokens}",
        value=rounded(seconds * 1e3),
        unit="ms",
        roofline=None if best is None else rounded(best * 1e3),
        share=None if best is None else best / seconds,
        note=note,
    )


def make_model(torch: Any, transformers: Any, config: dict[str, Any], device: str) -> Any:
    """Return a Llama with the weights that transformers begins with, made on the device."""
    fields = {
        name: value for name, value in config.items() if name not in ("architectures", "model_type", "torch_dtype")
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def token_seconds(torch: Any, model: Any, num_tokens: int, num_new: int, device: str) -> tuple[float, float]:
    """Median seconds between tokens at a context, and the 90th percentile; a first run compiles and does not count."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens - num_new), device=device)
    times: list[float] = []
    for _ in range(2):
        streamer = TokenTimes()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                do_sample=False,
                cache_implementation="static",
                streamer=streamer,
            )
        times = streamer.times
    gaps = sorted(b - a for a, b in zip(times[2:-1], times[3:], strict=True))
    return gaps[len(gaps) // 2], gaps[len(gaps) * 9 // 10]


def _failure(library: str, label: str, error: Exception) -> Figure:
    return Figure(
        part="peers", name=f"{library} {label}", value=None, note=f"{type(error).__name__}: {first_line(error)}"
    )
