"""Layers against numpy in float64, whole and split over devices."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers.attention import Attention, AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import DecoderLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.kv_layout import attended
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm, split_mean_squares
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.layers.params import Rows
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.models.causal_lm import TokenBatch
from jaxserve.models.decoder import build_mlp
from jaxserve.models.registry import build_model
from jaxserve.models.stages import stages_of
from pallas_kernels import AttentionBatch, PagedAttention, linear_xla
from pallas_kernels.linear import ACTIVATIONS, Fused
from pallas_kernels.registry import load
from sharding import MeshShape, get_layout, make_mesh
from tests.switchable import SwitchableConfig, build_layer
from tests.tiny_programs import KERNEL, tiny_config

POLICY = DtypePolicy()
SCOPE = Scope(policy=POLICY)
LAYOUT = get_layout("tensor_parallel")


def random(seed: int, *shape: int, spread: float = 1.0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).normal(0.0, spread, shape).astype(np.float32)


def split_over(size: int) -> Parallel:
    """What a module is told on ``size`` devices."""
    return Parallel.from_layout(LAYOUT, size) if size > 1 else Parallel()


def split_scope(size: int) -> Scope:
    """What a layer is told on ``size`` devices."""
    return Scope(parallel=split_over(size), policy=POLICY)


def randomize(module: nnx.Module, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters, in place; returns them by path, in float64."""
    values = {}
    for i, (path, param) in enumerate(nnx.to_flat_state(nnx.state(module))):
        target: Any = module
        for part in path[:-1]:
            target = getattr(target, str(part))
        value = jnp.asarray(random(seed + i, *param.get_value().shape, spread=0.5), param.get_value().dtype)
        getattr(target, str(path[-1]))[...] = value
        values[".".join(map(str, path))] = np.asarray(value, np.float64)
    return values


def call_split(module: nnx.Module, call: Callable[[Any], jax.Array], size: int) -> np.ndarray:
    """``call(module)`` on ``size`` devices, the module's parameters cut as their axes say."""
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    specs = tuple(LAYOUT.spec(*param.get_metadata()["axes"]) for _, param in nnx.to_flat_state(state))

    def body(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return call(nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays)))

    mesh = make_mesh(MeshShape(tensor=size))
    wrapped = jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=LAYOUT.spec(), check_vma=False)
    return np.asarray(jax.jit(wrapped)(tuple(leaves)))


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    return linear_xla.matmul(x, weight, weight.shape[0], fused=Fused())


@pytest.mark.parametrize("inner", [8, 576, 4096])
def test_float32_products_are_not_rounded(inner: int) -> None:
    """Operands rounded to bfloat16 or TF32 would be off by a thousand times the bound."""
    x, weight = random(0, 5, inner), random(1, 33, inner)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    scale = np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)
    found = jax.jit(project)(x, weight)
    assert found.dtype == jnp.float32
    assert (np.abs(np.asarray(found) - exact) <= 1e-6 * scale).all()
    precision = jax.make_jaxpr(project)(x, weight).eqns[-1].params["precision"]
    assert precision == (jax.lax.Precision.HIGHEST,) * 2, "accelerators would use TF32 else"


def test_bfloat16_products_accumulate_in_float32() -> None:
    """Operands in the weight's type, nothing else rounded."""
    x, weight = random(0, 5, 576), jnp.asarray(random(1, 33, 576)).astype(jnp.bfloat16)
    rounded = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)
    other = np.asarray(weight, np.float64)
    found = jax.jit(project)(x, weight)
    assert found.dtype == jnp.float32
    assert (np.abs(np.asarray(found) - rounded @ other.T) <= 1e-6 * (np.abs(rounded) @ np.abs(other).T)).all()


@pytest.mark.parametrize("shape", [(3, 16), (3, 4, 6)])
def test_norm(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(shape[-1], eps=1e-3, scope=SCOPE)
    weight = randomize(norm)["weight"]
    x = random(9, *shape, spread=0.05)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(norm(jnp.asarray(x)), exact, rtol=2e-6, atol=1e-6)


def test_norm_keeps_the_type_and_sums_in_float32() -> None:
    """256 squares of 300 overflow float16 and lose bits in bfloat16."""
    norm = RMSNorm(256, eps=1e-5, scope=Scope(policy=DtypePolicy(weights="bfloat16", activations="bfloat16")))
    for dtype in (jnp.bfloat16, jnp.float16):
        found = norm(jnp.full((2, 256), 300.0, dtype))
        assert found.dtype == dtype and (found == 1).all()


def test_norm_of_zeros_is_zero() -> None:
    assert (RMSNorm(8, eps=1e-5, scope=SCOPE)(jnp.zeros((2, 8))) == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mean_squares_of_a_split_width(size: int) -> None:
    first, second = random(0, 3, 16), random(1, 3, 8)
    mesh = make_mesh(MeshShape(tensor=size))
    spec = LAYOUT.spec(None, "q_heads")
    call = jax.shard_map(
        lambda a, b: split_mean_squares(a, b, "tensor" if size > 1 else None),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=LAYOUT.spec(),
        check_vma=False,
    )
    for found, x in zip(jax.jit(call)(first, second), (first, second), strict=True):
        np.testing.assert_allclose(found, (x.astype(np.float64) ** 2).mean(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [24, 21])
def test_vocabulary_split(vocab_size: int, size: int) -> None:
    """Both uses of the table; padding rows are never scored, even where they hold large values."""
    table = VocabEmbedding(vocab_size, 6, scope=split_scope(size))
    assert table.weight.get_value().shape == (-(-vocab_size // size) * size, 6)
    weight = randomize(table)["weight"]
    table.weight[...] = table.weight[...].at[vocab_size:].set(1e6)
    tokens = jnp.array([0, 1, vocab_size - 1, vocab_size // 2, 5, 6, 7, 11, 12])
    embedded = call_split(table, lambda module: module(tokens), size)
    np.testing.assert_array_equal(embedded, weight[np.asarray(tokens)].astype(np.float32))
    hidden = jnp.asarray(random(3, 4, 6))
    scores = call_split(table, lambda module: module.logits(hidden), size)
    assert scores.shape == (4, vocab_size)
    np.testing.assert_allclose(scores, np.asarray(hidden, np.float64) @ weight[:vocab_size].T, rtol=1e-5, atol=1e-5)


def test_embeddings_and_scores_have_their_types() -> None:
    """bfloat16 weights: activations as the policy says, scores in float32."""
    for activations in ("float32", "bfloat16"):
        policy = DtypePolicy(weights="bfloat16", activations=activations)
        for size in (1, 2):
            table = VocabEmbedding(8, 6, scope=Scope(parallel=split_over(size), policy=policy))
            assert call_split(table, lambda module: module(jnp.array([3])), size).dtype == jnp.dtype(activations)
            assert call_split(table, lambda module: module.logits(jnp.ones((1, 6))), size).dtype == np.float32


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_adds_its_bias_once(bias: bool, size: int) -> None:
    """Device d holds columns d of the weight and features d of the input; every device the whole bias."""
    axis = split_over(size).ffn
    linear = RowParallelLinear(12, 5, inner_axis="ffn", mesh_axis=axis, bias=bias, scope=split_scope(size))
    values = randomize(linear)
    x = random(7, 3, 12)

    def call(module: RowParallelLinear) -> jax.Array:
        width = 12 // size
        start = 0 if axis is None else jax.lax.axis_index(axis) * width
        return module(jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, width, 1))

    exact = x @ values["weight"].T + values.get("bias", 0.0)
    np.testing.assert_allclose(call_split(linear, call, size), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_column_parallel(bias: bool) -> None:
    linear = ColumnParallelLinear(6, [Rows("up", 12)], outer_axis="ffn", mesh_axis=None, bias=bias, scope=SCOPE)
    values = randomize(linear)
    x = random(7, 3, 6)
    exact = x @ values["weight"].T + values.get("bias", 0.0)
    np.testing.assert_allclose(linear(jnp.asarray(x)), exact, rtol=1e-5, atol=1e-5)
    gathered = call_split(
        linear, lambda module: jax.lax.all_gather(module(jnp.asarray(x)), "tensor", axis=1, tiled=True), 4
    )
    np.testing.assert_allclose(gathered, exact, rtol=1e-5, atol=1e-5)


ERF = np.vectorize(math.erf)
EXACT_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + ERF(x / np.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str) -> None:
    config = tiny_config(activation=activation, mlp_bias=True)
    mlp = build_mlp(config, SCOPE)
    values = randomize(mlp)
    x = random(5, 3, config.hidden_size)
    gate, up = np.split(x @ values["gate_up.weight"].T + values["gate_up.bias"], 2, axis=1)
    exact = (EXACT_ACTIVATIONS[activation](gate) * up) @ values["down.weight"].T + values["down.bias"]
    np.testing.assert_allclose(mlp(jnp.asarray(x)), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_mlp_split(size: int) -> None:
    """Rows of gate and up ordered by device: each has its share of gate, then of up."""
    config = tiny_config(mlp_bias=True)
    whole = build_mlp(config, SCOPE)
    randomize(whole)
    split = build_mlp(config, split_scope(size))
    nnx.update(split, nnx.state(whole))
    order = np.arange(2 * config.ffn_size).reshape(2, size, -1).transpose(1, 0, 2).ravel()
    for name in ("weight", "bias"):
        param = getattr(split.gate_up, name)
        param[...] = param[...][order]
    x = jnp.asarray(random(5, 3, config.hidden_size))
    np.testing.assert_allclose(call_split(split, lambda module: module(x), size), whole(x), rtol=1e-5, atol=1e-5)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"qkv_bias": True, "out_bias": True},
    "multi_head": {"num_kv_heads": 4},
    "multi_query_wide_head": {"num_kv_heads": 1, "head_dim": 10},
    "norm_of_heads": {"qk_norm": "head"},
    "norm_of_width": {"qk_norm": "width"},
    "window": {"sliding_windows": (3, None)},
    "soft_cap": {"attention_soft_cap": 2.0},
    "scale": {"attention_scale": 0.07},
    "no_rotation": {"rope_layers": (False, True)},
}


def one_row(length: int) -> AttentionBatch:
    """A prompt in pages 2, 0, 1."""
    pages, positions = np.array([2, 0, 1]), np.arange(length)
    fields = {
        "page_table": pages[None],
        "context_lens": [length],
        "query_starts": [0],
        "query_lens": [length],
        "num_rows": 1,
        "token_pages": pages[positions // 8],
        "token_offsets": positions % 8,
        "num_shared_pages": 0,
    }
    return AttentionBatch(**{name: jnp.asarray(field, jnp.int32) for name, field in fields.items()})


def attend(module: Attention, x: np.ndarray, config: SwitchableConfig) -> jax.Array:
    """The layer's output for one prompt, over pools of its own."""
    length = len(x)
    positions = jnp.arange(length)
    rotation = rope_cos_sin(config.rope, positions, jnp.full(length, length))
    specs = KERNEL.pool_specs(3, 8, module.num_kv_heads, config.head_dim)
    pools = (jnp.zeros(specs[0].shape), jnp.zeros(specs[1].shape))
    settings, batch = AttentionSettings(KERNEL, 8, decode_only=False), one_row(length)
    heads = module.heads(module.project(jnp.asarray(x)), None if module.rope is None else rotation)
    pools = KERNEL.write_kv(pools, heads.key, heads.value, batch, 8)
    return module.output(module.attend(heads.query, pools, batch, settings))


def exact_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def exact_attention(values: dict[str, np.ndarray], x: np.ndarray, config: SwitchableConfig) -> np.ndarray:
    """A loop over heads in float64."""
    heads, kv_heads, dim, length = config.num_heads, config.num_kv_heads, config.head_dim, len(x)
    qkv = x @ values["qkv.weight"].T + values.get("qkv.bias", 0.0)
    query, key, value = np.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
    if config.qk_norm == "width":
        query = exact_norm(query, values["q_norm.weight"], config.norm_eps)
        key = exact_norm(key, values["k_norm.weight"], config.norm_eps)
    query, key, value = (a.reshape(length, -1, dim) for a in (query, key, value))
    if config.qk_norm == "head":
        query = exact_norm(query, values["q_norm.weight"], config.norm_eps)
        key = exact_norm(key, values["k_norm.weight"], config.norm_eps)
    if config.rope_layers[0]:
        query, key = exact_rotation(query, config), exact_rotation(key, config)
    behind = np.arange(length)[:, None] - np.arange(length)
    seen = (behind >= 0) & (behind < (config.sliding_windows[0] or length))
    out = np.zeros((length, heads, dim))
    for head in range(heads):
        kv_head = head * kv_heads // heads
        scores = query[:, head] @ key[:, kv_head].T * (config.attention_scale or dim**-0.5)
        if config.attention_soft_cap is not None:
            scores = config.attention_soft_cap * np.tanh(scores / config.attention_soft_cap)
        weights = np.where(seen, np.exp(scores), 0.0)
        out[:, head] = weights / weights.sum(1, keepdims=True) @ value[:, kv_head]
    return out.reshape(length, -1) @ values["out.weight"].T + values.get("out.bias", 0.0)


def exact_rotation(x: np.ndarray, config: SwitchableConfig) -> np.ndarray:
    """Feature i of the first half turns with feature i of the second."""
    dim = config.rope.rotary_dim
    angles = np.arange(len(x))[:, None] * config.rope.theta ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., dim:]], axis=-1)


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention(case: str) -> None:
    config = tiny_config(**ATTENTIONS[case])
    module = build_layer(config, 0, SCOPE).attention
    values = randomize(module)
    x = random(8, 19, config.hidden_size)
    np.testing.assert_allclose(attend(module, x, config), exact_attention(values, x, config), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": "width"}, {"qk_norm": "head", "num_kv_heads": 4}])
def test_attention_split(changes: dict[str, Any]) -> None:
    """Four devices; of two key/value heads, each is on two of them."""
    config, size = tiny_config(out_bias=True, qkv_bias=True, **changes), 4
    whole, split = (build_layer(config, 0, scope).attention for scope in (SCOPE, split_scope(size)))
    assert isinstance(whole, GroupedQueryAttention) and isinstance(split, GroupedQueryAttention)
    randomize(whole)
    dim, kv_heads = config.head_dim, config.num_kv_heads
    rows = np.arange((config.num_heads + 2 * kv_heads) * dim).reshape(-1, dim)
    query, key, value = np.split(rows, [config.num_heads, config.num_heads + kv_heads])
    held = [device * kv_heads // size for device in range(size)]
    order = np.concatenate([part for d in range(size) for part in (query[d], key[held[d]], value[held[d]])])
    nnx.update(split.out, nnx.state(whole.out))
    for name in ("weight", "bias"):
        getattr(split.qkv, name)[...] = getattr(whole.qkv, name)[...][order]
    if config.qk_norm != "none":
        nnx.update(split.q_norm, nnx.state(whole.q_norm))
        wide = np.arange(kv_heads * dim).reshape(-1, dim)[held].ravel()
        assert whole.k_norm is not None and split.k_norm is not None
        weight, held_weight = whole.k_norm.weight, split.k_norm.weight
        assert weight is not None and held_weight is not None
        held_weight[...] = weight[...][wide] if config.qk_norm == "width" else weight[...]
    x = random(8, 19, config.hidden_size)
    found = call_split(split, lambda module: attend(module, x, config), size)
    np.testing.assert_allclose(found, attend(whole, x, config), rtol=1e-4, atol=5e-5)


def decode(
    layer: DecoderLayer, x: np.ndarray, config: SwitchableConfig, kernel: PagedAttention, tile: int | None
) -> Any:
    """A decoder layer's output for one prompt."""
    length = len(x)
    rotation = rope_cos_sin(config.rope, jnp.arange(length), jnp.full(length, length))
    inputs = AttentionInputs(one_row(length), jnp.int32(length), jnp.arange(length), (rotation,))
    pools = tuple(jnp.zeros(spec.shape) for spec in kernel.pool_specs(3, 8, config.num_kv_heads, config.head_dim))
    settings = AttentionSettings(kernel, 8, decode_only=False, row_tile=tile)
    return layer(jnp.asarray(x), (pools[0], pools[1]), inputs, settings)[0]


@pytest.mark.parametrize("row", ["pallas-interpret", "native"])
@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("case", ["bias", "norm_of_heads", "norm_of_width", "no_rotation"])
def test_a_kernel_that_writes_from_the_projection_changes_nothing(case: str, tile: int | None, row: str) -> None:
    """Norm, rotation and write in one kernel, against the layer's own."""
    config = tiny_config(**ATTENTIONS[case])
    layer = build_layer(config, 0, SCOPE)
    randomize(layer)
    fused = load("paged_attention", row)
    if (reason := fused.unsupported("cpu", "cpu", "float32")) is not None:
        pytest.skip(reason)
    own = load("paged_attention", "xla")
    assert own.writer is None and fused.writer is not None
    x = random(9, 16, config.hidden_size)
    expected = decode(layer, x, config, own, tile)
    np.testing.assert_allclose(decode(layer, x, config, fused, tile), expected, rtol=1e-4, atol=5e-5)


def test_policies() -> None:
    """CPUs keep only weights in a 16-bit type."""
    assert DtypePolicy.for_platform("float32", "cpu") == DtypePolicy()
    mixed = DtypePolicy(weights="bfloat16", activations="float32", kv="float32")
    assert DtypePolicy.for_platform("bfloat16", "cpu") == mixed
    whole = DtypePolicy(weights="bfloat16", activations="bfloat16", kv="bfloat16")
    assert DtypePolicy.for_platform("bfloat16", "gpu") == whole
    assert str(mixed) == "weights bfloat16, activations float32, KV pages float32, accumulation float32"
    assert dataclasses.replace(mixed, weights="float32") == DtypePolicy()


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_one_after_the_other_are_the_model(is_tied: bool) -> None:
    config = tiny_config(num_layers=3, rope_layers=(True,) * 3, sliding_windows=(None, 3, None), tie_embeddings=is_tied)
    model = build_model(config)
    randomize(model)
    length = 11
    tokens, positions = jnp.arange(length) * 4, jnp.arange(length)
    pools: list[Pools] = []
    for spec in attended(model.kv_specs):
        keys, values = KERNEL.pool_specs(3, 8, spec.num_kv_heads, spec.head_dim)
        pools.append((jnp.zeros(keys.shape), jnp.zeros(values.shape)))
    settings = AttentionSettings(KERNEL, 8, decode_only=False)
    batch = TokenBatch(tokens, positions, jnp.full(length, length), (one_row(length),))
    whole, written, _, aux = model.hidden(batch, pools, settings, aux_layers=(0, 2))
    x, stage, inputs = None, model, list[Any]()
    for kept, drafts in zip(stages_of([1, 1, 1]), (False, False, not is_tied), strict=True):
        stage = nnx.clone(model)
        stage.keep_stage(kept, drafts)
        own = pools[kept.first : kept.stop]
        x, pools[kept.first : kept.stop], _, given = stage.hidden(batch, own, settings, x, (0, 2))
        inputs += [] if given is None else [given]
        has_embedding = kept.is_first or (kept.is_last and (is_tied or drafts))
        assert (stage.embed is not None, stage.norm is not None) == (has_embedding, kept.is_last)
    np.testing.assert_array_equal(jnp.concatenate(inputs, 1), aux)
    assert x is not None
    np.testing.assert_array_equal(stage.logits(x), model.logits(whole))
    for found, expected in zip(pools, written, strict=True):
        for pool, expected_pool in zip(found, expected, strict=True):
            np.testing.assert_array_equal(pool, expected_pool)
