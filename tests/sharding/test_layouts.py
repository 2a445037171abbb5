"""Layouts as data, and one row for each of them: the same logits as replicated, and the collectives it states."""

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve.api.errors import ConfigError
from jaxserve.device.batch import build
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.slots import Slots
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.device.steps import attention_settings
from jaxserve.layers.expert_dispatch import exchange_capacity
from jaxserve.layers.sparse_mlp import Routing
from jaxserve.models.registry import FAMILIES
from jaxserve.scheduling.plan import PageGrant, Sampling, SlotSetup
from sharding import LAYOUTS, LayoutError, MeshShape, ShardingLayout, get_layout, make_mesh
from sharding.plan import count_collectives, stated_collectives, stated_sampling
from tests import toy_attention
from tests.plan_rows import Row, make_plan
from tests.tiny_programs import (
    NUM_LAYERS,
    gpt2_config,
    gpt_oss_config,
    latent_config,
    make_program,
    random_params,
    sparse_config,
    tiny_config,
)

TENSOR = [(2, 1), (4, 1), (8, 1)]
EXPERT = [(1, 2), (2, 2), (2, 4), (1, 8)]
ROWS = {
    "context_parallel": TENSOR,
    "expert_all_reduce": EXPERT,
    "expert_all_to_all": EXPERT,
    "expert_gather": [*EXPERT, (2, 1)],
    "expert_parallel": TENSOR,
    "replicated": TENSOR,
    "replicated_attention": TENSOR,
    "sequence_parallel": TENSOR,
    "split_logits": TENSOR,
    "tensor_parallel": TENSOR,
}
"""The meshes, devices along ``tensor`` and ``expert``, that each layout is tested on."""
DENSE = tiny_config(num_heads=8, hidden_size=32)
ROUTING = Routing(num_experts=8, experts_per_token=1, is_normalized=False)
CONFIGS = {"dense": DENSE, "sparse": sparse_config(num_heads=8, hidden_size=32)}
CONFIGS["latents"] = latent_config(num_heads=8, num_kv_heads=8, hidden_size=32)
CONFIGS["switch"] = sparse_config(num_heads=8, hidden_size=32, routing=ROUTING)
CONFIGS["learned positions"] = gpt2_config()
LANES = ("experts", "batch", "pages")
SHAPE = BatchShape(num_tokens=16, num_rows=4, table_pages=4, decode_only=False)
PROMPTS = ([3, 50, 7, 21, 0], [52, 9], [1, 2, 3, 4, 5, 6, 7, 8])


def forward(program: ShardedModel) -> jax.stages.Wrapped:
    """Logits of every token of a mixed step, on the program's mesh."""
    abstract = program.abstract_model
    settings = attention_settings(program, SHAPE)

    def body(arrays: tuple[jax.Array, ...], pools: list, buffer: jax.Array) -> jax.Array:
        model = abstract.merge(arrays)
        nothing = LatestTokens(*jnp.zeros((2, program.num_slots), jnp.int32))
        batch = program.unpack(buffer, SHAPE, nothing)
        hidden, *_ = model.hidden(batch, pools, settings)
        return model.logits(hidden)

    param_specs = tuple(struct.sharding.spec for struct in abstract.params.values())
    pools = list(program.abstract_state().pools)
    pool_specs = jax.tree.map(lambda struct: struct.sharding.spec, pools)
    rows, logits = program.rows_sharding.spec, program.vocab_sharding.spec
    wrapped = jax.shard_map(
        body, mesh=program.mesh, in_specs=(param_specs, pool_specs, rows), out_specs=logits, check_vma=False
    )
    return jax.jit(wrapped)


def prompts_of(lane: int) -> list[int]:
    """The prompts that a lane computes: all, then fewer and fewer, down to none."""
    return [*range(lane % (len(PROMPTS) + 1), len(PROMPTS))]


def prompt_buffer(program: ShardedModel, prompts: list[int]) -> np.ndarray:
    """Prompts as prefill rows, a page each."""
    setups = [SlotSetup(slot, Sampling(), 20) for slot in range(len(prompts))]
    grants = [PageGrant(slot, 0, [5 * slot]) for slot in range(len(prompts))]
    prefill = [Row(slot, 0, PROMPTS[prompt], 1) for slot, prompt in enumerate(prompts)]
    plan = make_plan(0, setups, grants, prefill)
    pages = SHAPE.table_pages, program.page_size, program.num_pages
    slots = Slots(program.num_slots, *pages, program.config.vocab_size)
    slots.apply(plan)
    return build(slots, plan, SHAPE, 0)


def logits_and_collectives(program: ShardedModel) -> tuple[list[np.ndarray], dict[str, int]]:
    """Logits of each lane's tokens, and what the program communicates."""
    pools = jax.tree.map(
        lambda struct: jax.device_put(np.zeros(struct.shape, struct.dtype), struct.sharding),
        list(program.abstract_state().pools),
    )
    call = forward(program)
    lanes = range(program.num_lanes)
    arguments = (random_params(program), pools, np.concatenate([prompt_buffer(program, prompts_of(i)) for i in lanes]))
    traced = call.trace(*arguments)
    logits = np.asarray(traced.lower().compile()(*arguments)).reshape(program.num_lanes, SHAPE.num_tokens, -1)
    counts = [sum(len(PROMPTS[prompt]) for prompt in prompts_of(lane)) for lane in lanes]
    size = program.config.vocab_size
    return [each[:count, :size] for each, count in zip(logits, counts, strict=True)], count_collectives(traced)


@functools.cache
def whole_logits(name: str) -> list[np.ndarray]:
    """Those of each prompt, on one device."""
    (logits,), counted = logits_and_collectives(make_program(CONFIGS[name]))
    assert counted == {}
    return np.split(logits, np.cumsum([len(prompt) for prompt in PROMPTS])[:-1])


def combinations() -> list[tuple[str, str, int, int]]:
    """Every layout on its meshes, with the models that it can split."""
    found = [
        (model, layout, tensor, expert)
        for layout, meshes in ROWS.items()
        for tensor, expert in meshes
        for model in (("sparse", "switch") if expert > 1 else ("dense", "sparse"))
    ]
    latents = [
        ("latents", layout, *mesh) for layout, meshes in ROWS.items() for mesh in [(2, 2), (8, 1)] if mesh in meshes
    ]
    return found + latents


@pytest.mark.parametrize(("model", "layout", "tensor", "expert"), combinations())
def test_layout(model: str, layout: str, tensor: int, expert: int) -> None:
    """Two key/value heads: on 4 and 8 devices they are replicated; the vocabulary of 53 is padded."""
    program = make_program(CONFIGS[model], tensor=tensor, expert=expert, layout=layout)
    logits, counted = logits_and_collectives(program)
    assert len(logits) == (expert if layout in ("expert_gather", "expert_all_to_all") else 1)
    for lane, found in enumerate(logits):
        expected = [whole_logits(model)[prompt] for prompt in prompts_of(lane)]
        np.testing.assert_allclose(found, np.concatenate([found[:0], *expected]), atol=2e-5, rtol=2e-5)
    per_token = 1 if model == "switch" else 3
    has_fallback = exchange_capacity(SHAPE.num_tokens, per_token, expert) < SHAPE.num_tokens
    stated = stated_collectives(program.layout, NUM_LAYERS, int(model != "dense"), has_fallback=has_fallback)
    assert counted == stated
    assert has_fallback == (model == "switch" and expert >= 4)


OWN = [("dense", ("q_heads", "kv_heads", *axes)) for axes in ((), ("vocab",))]
OWN += [
    (model, ("q_heads", "kv_heads", *axes))
    for model in ("sparse", "latents")
    for axes in (("expert_ffn",), ("experts",), ("vocab", "expert_ffn"))
]
OWN += [("dense", ()), ("sparse", ("experts",)), ("latents", ("experts", "vocab"))]
OWN += [("dense", ("q_heads", "tokens")), ("sparse", ("q_heads", "tokens", "experts"))]
OWN += [("latents", ("q_heads", "tokens", "vocab", "expert_ffn"))]


OWN = [(*each, "gathered") for each in OWN] + [(*each, "split") for each in OWN if "vocab" in each[1]]


@pytest.mark.parametrize(("model", "axes", "logits"), OWN)
def test_layouts_that_are_not_in_the_registry(model: str, axes: tuple[str, ...], logits: str) -> None:
    """Features split, and what an engine accepts besides."""
    layout = ShardingLayout("own", dict.fromkeys(("ffn", *axes), "tensor"), logits=logits)
    like = "context_parallel" if "tokens" in axes else "tensor_parallel"
    program = dataclasses.replace(make_program(CONFIGS[model], tensor=2, layout=like), layout=layout)
    (found,), counted = logits_and_collectives(program)
    np.testing.assert_allclose(found, np.concatenate(whole_logits(model)), atol=2e-5, rtol=2e-5)
    assert counted == stated_collectives(layout, NUM_LAYERS, int(model != "dense"))


SHARED = [
    ("dense", 4, 1, {}, "all_reduce"),
    ("dense", 2, 1, {"vocab": "tensor"}, "all_reduce"),
    ("learned positions", 4, 1, {}, "all_reduce"),
    ("sparse", 2, 1, {"experts": "tensor"}, "all_reduce"),
    ("sparse", 2, 2, {"vocab": "tensor", "expert_ffn": "tensor", "experts": "expert"}, "all_reduce"),
    *[
        (model, 2, 4, {"vocab": "tensor", "expert_ffn": "tensor", **dict.fromkeys(LANES, "expert")}, dispatch)
        for model in ("sparse", "switch")
        for dispatch in ("gather", "all_to_all")
    ],
]
"""Models and meshes, and layouts that split hidden states between blocks by tokens."""


@pytest.mark.parametrize(("model", "tensor", "expert", "rules", "dispatch"), SHARED)
def test_devices_share_tokens_however_the_rest_is_split(
    model: str, tensor: int, expert: int, rules: dict[str, str], dispatch: str
) -> None:
    """Also those of a lane, whose experts are on other lanes' devices too."""
    rules = {**dict.fromkeys(("q_heads", "kv_heads", "ffn"), "tensor"), **rules}
    layout = ShardingLayout("own", rules, dispatch, residual="tokens")
    program = make_program(CONFIGS[model], tensor=tensor, expert=expert, layout="replicated")
    logits, counted = logits_and_collectives(dataclasses.replace(program, layout=layout))
    assert len(logits) == (expert if "batch" in rules else 1)
    for lane, found in enumerate(logits):
        expected = [whole_logits(model)[prompt] for prompt in prompts_of(lane)]
        np.testing.assert_allclose(found, np.concatenate([found[:0], *expected]), atol=2e-5, rtol=2e-5)
    has_fallback = model == "switch" and dispatch == "all_to_all"
    num_sparse = int(model in ("sparse", "switch"))
    assert counted == stated_collectives(layout, NUM_LAYERS, num_sparse, has_fallback=has_fallback)
    assert counted["all-gather"] >= 2 * NUM_LAYERS + 1


@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
def test_lanes_whose_devices_share_the_tokens_of_pages(dispatch: str) -> None:
    """Each lane's pages are its own devices'; these have every second token of them."""
    rules = {**get_layout(f"expert_{dispatch}").rules, "tokens": "tensor"}
    del rules["kv_heads"]
    layout = ShardingLayout("own", rules, dispatch)
    program = make_program(CONFIGS["latents"], tensor=2, expert=2, layout=f"expert_{dispatch}")
    whole_pages = program.pool_bytes
    program = dataclasses.replace(program, layout=layout)
    assert 2 * program.pool_bytes == whole_pages
    logits, counted = logits_and_collectives(program)
    for lane, found in enumerate(logits):
        expected = [whole_logits("latents")[prompt] for prompt in prompts_of(lane)]
        np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-5, rtol=2e-5)
    assert counted == stated_collectives(layout, NUM_LAYERS, 1)


SIX_HEADS = {
    "dense": tiny_config(num_heads=6, num_kv_heads=3),
    "norms of all heads": tiny_config(num_heads=6, num_kv_heads=3, qk_norm="width"),
    "sinks": gpt_oss_config(num_heads=6),
    "latents": latent_config(num_heads=6, num_kv_heads=6),
    "attention of one's own": tiny_config(num_heads=6, num_kv_heads=1, architecture=toy_attention.ARCHITECTURE),
}


@pytest.mark.parametrize("model", SIX_HEADS)
def test_whole_attention_needs_no_number_of_heads(
    model: str, switchable_family: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads on four devices, each of which has the weights and pages of all of them."""
    monkeypatch.setitem(FAMILIES, toy_attention.ARCHITECTURE, toy_attention.__name__)
    config = SIX_HEADS[model]
    one, four = make_program(config), make_program(config, tensor=4, layout="replicated_attention")
    (expected,), _ = logits_and_collectives(one)
    (found,), counted = logits_and_collectives(four)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
    num_sparse = {"sinks": NUM_LAYERS, "latents": 1}.get(model, 0)
    assert counted == stated_collectives(four.layout, NUM_LAYERS, num_sparse)
    assert four.pool_bytes == one.pool_bytes
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide 6 query heads"):
        _ = make_program(config, tensor=4).abstract_model


@pytest.mark.parametrize("model", SIX_HEADS)
def test_devices_that_share_tokens_need_no_number_of_key_value_heads(
    model: str, switchable_family: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both devices have three heads of half the tokens; a norm over all heads of keys is then whole."""
    monkeypatch.setitem(FAMILIES, toy_attention.ARCHITECTURE, toy_attention.__name__)
    config = SIX_HEADS[model]
    one, two = make_program(config), make_program(config, tensor=2, layout="context_parallel")
    (expected,), _ = logits_and_collectives(one)
    (found,), counted = logits_and_collectives(two)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
    stated = stated_collectives(two.layout, NUM_LAYERS, {"sinks": NUM_LAYERS, "latents": 1}.get(model, 0))
    stated["all-reduce"] += NUM_LAYERS if model == "norms of all heads" else 0
    assert counted == stated
    assert 2 * two.pool_bytes == one.pool_bytes


def test_whole_attention_needs_features_that_divide() -> None:
    config = tiny_config(num_heads=6, num_kv_heads=3)
    message = "tensor_parallel_size=5 does not divide intermediate_size 24 of LlamaForCausalLM; valid sizes: 1, 2, 3, 4"
    with pytest.raises(ConfigError, match=message):
        _ = make_program(config, tensor=5, layout="replicated_attention").abstract_model


def test_stated_collectives() -> None:
    """By hand, for three layers of which two have experts."""
    mesh, one = make_mesh(MeshShape(tensor=2, expert=2)), make_mesh(MeshShape(expert=2))
    stated = {
        ("expert_all_reduce", mesh): {"all-reduce": 3 + 1 + 2 + 1, "all-gather": 1},
        ("expert_all_reduce", one): {"all-reduce": 2},
        ("expert_gather", mesh): {"all-reduce": 3 + 1 + 2 + 1, "all-gather": 1 + 4, "reduce-scatter": 2},
        ("expert_gather", one): {"all-gather": 4, "reduce-scatter": 2},
        ("expert_all_to_all", mesh): {"all-reduce": 3 + 1 + 2 + 1, "all-gather": 1, "all-to-all": 6},
        ("expert_all_to_all", one): {"all-to-all": 6},
        ("expert_parallel", mesh): {"all-reduce": 3 + 1 + 2 + 1, "all-gather": 1},
        ("context_parallel", mesh): {"all-reduce": 3 + 1 + 2 + 1, "all-gather": 1 + 3, "all-to-all": 3},
        ("replicated", mesh): {},
        ("replicated_attention", mesh): {"all-reduce": 1 + 2 + 1, "all-gather": 1},
        ("sequence_parallel", mesh): {"reduce-scatter": 3 + 1 + 2 + 1, "all-gather": 2 * 3 + 1 + 1},
        ("sequence_parallel", one): {},
        ("split_logits", mesh): {"all-reduce": 3 + 1 + 2 + 1},
    }
    for (name, devices), expected in stated.items():
        assert stated_collectives(get_layout(name).on(devices), 3, 2) == expected, name
    found = stated_collectives(get_layout("expert_all_to_all").on(one), 3, 2, has_fallback=True)
    assert found == {"all-to-all": 12, "all-reduce": 2}, "both exchanges, and the count that chooses"


def test_stated_sampling() -> None:
    """By hand; a layout that gathers logits has them for sampling, and so has one device."""
    split = get_layout("split_logits")
    for layout in (get_layout("tensor_parallel"), split.on(make_mesh(MeshShape(expert=2)))):
        assert stated_sampling(layout, "full", has_processors=True) == {}
    assert stated_sampling(split, "greedy") == {"all-gather": 1}
    assert stated_sampling(split, "sampled") == {"all-gather": 1 + 35, "all-reduce": 2}
    assert stated_sampling(split, "full") == {"all-gather": 1 + 35 + 3, "all-reduce": 4}
    assert stated_sampling(split, "full", has_processors=True) == {"all-gather": 1 + 35 + 4, "all-reduce": 4}


def test_every_layout_has_a_row() -> None:
    assert set(ROWS) == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_named_and_described(name: str) -> None:
    layout = get_layout(name)
    assert layout.name == name
    description = importlib.import_module(LAYOUTS[name]).__doc__ or ""
    assert "collective" in description, "the docstring says what the layout communicates"


def test_unknown_layout() -> None:
    with pytest.raises(
        LayoutError,
        match="unknown layout 'tp'; supported layouts: context_parallel, .*split_logits, tensor_parallel",
    ):
        get_layout("tp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OWN = 1", "expected 'OWN' in .*own.py to be a ShardingLayout, got int; it defines OTHER"),
        ("", "expected 'OWN' in .*own.py to be a ShardingLayout, got NoneType; it defines OTHER"),
        ("1 / 0", "own.py cannot be run: ZeroDivisionError: division by zero"),
        ("OWN = ShardingLayout('own', {'heads': 'tensor'})", "layout 'own': unknown logical axis 'heads'"),
    ],
)
def test_a_file_without_the_layout(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from sharding import ShardingLayout\nOTHER = ShardingLayout('other', {{}})\n{text}\n")
    with pytest.raises(LayoutError, match=message):
        get_layout(f"{file}:OWN")
    assert text or get_layout(f"{file}:OTHER").name == "other"


def test_a_layout_comes_from_local_python_files_only(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/absent.py:OWN", f"{tmp_path}:OWN", "package.module:OWN"):
        with pytest.raises(LayoutError, match="layout: expected an existing local Python file in path.py:NAME, got"):
            get_layout(name)


def test_unknown_axes() -> None:
    with pytest.raises(LayoutError, match=r"layout 'bad': unknown logical axis 'heads'; known: \('vocab', 'embed'"):
        ShardingLayout("bad", {"heads": "tensor"})
    with pytest.raises(LayoutError, match=r"layout 'bad': unknown mesh axis 'model'; known: \('data', 'stage'"):
        ShardingLayout("bad", {"vocab": "model"})
    with pytest.raises(LayoutError, match="layout 'replicated': unknown logical axis 'width'"):
        get_layout("replicated").spec("embed", "width")
    with pytest.raises(LayoutError, match="layout 'replicated': unknown logical axis 'width'"):
        get_layout("replicated").mesh_axis("width")


def test_one_mesh_axis_splits_one_dimension() -> None:
    message = r"maps two dimensions of \('vocab', None, 'ffn'\) to one mesh axis: \['tensor', None, 'tensor'\]"
    with pytest.raises(LayoutError, match=f"layout 'tensor_parallel' {message}"):
        get_layout("tensor_parallel").spec("vocab", None, "ffn")


def test_dimensions_of_several_axes() -> None:
    layout = get_layout("expert_gather")
    assert layout.spec(("experts", "expert_ffn"), "embed") == P(("expert", "tensor"))
    assert layout.spec(("experts", "embed"), "expert_ffn") == P("expert", "tensor")
    assert get_layout("expert_parallel").spec(("experts", "expert_ffn")) == P("tensor")
    with pytest.raises(LayoutError, match=r"maps two dimensions of \(\('experts', 'batch'\), 'ffn'\) to one mesh axis"):
        layout.spec(("experts", "batch"), "ffn")


@pytest.mark.parametrize(
    ("rules", "dispatch", "message"),
    [
        ({}, "scatter", "unknown dispatch 'scatter'; known: .'all_reduce', 'gather'"),
        ({"batch": "expert"}, "all_reduce", "splits batch over expert and pages over None; .* must name one mesh axis"),
        ({"pages": "expert"}, "all_reduce", "splits batch over None and pages over expert"),
        (
            {"batch": "tensor", "pages": "tensor", "ffn": "tensor"},
            "all_reduce",
            "splits batch and ffn over tensor; an axis that splits rows can split only experts besides",
        ),
        (
            {"batch": "expert", "pages": "expert", "experts": "expert"},
            "all_reduce",
            "dispatch 'all_reduce' with batch over expert and experts over expert; gather and all_to_all need both",
        ),
        ({"experts": "expert"}, "gather", "dispatch 'gather' with batch over None and experts over expert"),
        ({"batch": "data", "pages": "data", "experts": "expert"}, "all_to_all", "dispatch 'all_to_all' with batch"),
        (
            {"batch": "data", "pages": "data"},
            "all_reduce",
            "dispatch 'all_reduce' with batch over data and experts over",
        ),
        ({}, "gather", "dispatch 'gather' with batch over None and experts over None"),
    ],
)
def test_layouts_that_contradict_themselves(rules: dict[str, str], dispatch: str, message: str) -> None:
    with pytest.raises(LayoutError, match=f"layout 'bad'.* ?{message}"):
        ShardingLayout("bad", rules, dispatch)


def test_hidden_states_are_split_as_blocks_are() -> None:
    with pytest.raises(LayoutError, match=r"layout 'bad': unknown residual 'rows'; known: \('replicated', 'tokens'\)"):
        ShardingLayout("bad", {}, residual="rows")
    for rules, found in (({}, "None and None"), ({"ffn": "tensor"}, "None and tensor")):
        message = f"layout 'bad': residual 'tokens' needs q_heads and ffn over one mesh axis, got {found}"
        with pytest.raises(LayoutError, match=message):
            ShardingLayout("bad", rules, residual="tokens")


def test_logits_are_split_over_the_axis_of_the_vocabulary() -> None:
    with pytest.raises(LayoutError, match="layout 'bad': logits 'split' needs a mesh axis for vocab"):
        ShardingLayout("bad", {"ffn": "tensor"}, logits="split")
    with pytest.raises(LayoutError, match="layout 'bad': unknown logits 'whole'; known: .'gathered', 'split'"):
        ShardingLayout("bad", {"vocab": "tensor"}, logits="whole")
    split = get_layout("split_logits")
    assert split.on(make_mesh(MeshShape(tensor=2))) is split
    assert split.on(make_mesh(MeshShape(expert=2))).logits == "gathered"


def test_specs() -> None:
    """No trailing None: a spec with one compares unequal to what a step gives back."""
    layout = get_layout("tensor_parallel")
    assert layout.spec("embed", "q_heads") == P(None, "tensor")
    assert tuple(layout.spec("vocab", "embed")) == ("tensor",)
    assert tuple(layout.spec("embed", None)) == () == tuple(layout.spec())
    mesh = make_mesh(MeshShape(tensor=4))
    assert layout.sharding(mesh, "vocab", "embed").shard_shape((8, 6)) == (2, 6)


def test_axes_of_one_device_are_dropped() -> None:
    """With their collectives; what stays is untouched."""
    layout = get_layout("tensor_parallel")
    alone = layout.on(make_mesh(MeshShape(data=2)))
    assert dict(alone.rules) == {} and alone.name == layout.name
    assert stated_collectives(alone, 3) == {}
    assert layout.on(make_mesh(MeshShape(tensor=2))) is layout
    sequence = get_layout("sequence_parallel")
    assert sequence.residual_axis == "tensor" and alone.residual_axis is None
    assert sequence.on(make_mesh(MeshShape(expert=2))).residual == "replicated"
    mixed = ShardingLayout("mixed", {"embed": "data", "vocab": "tensor"}).on(make_mesh(MeshShape(tensor=2)))
    assert dict(mixed.rules) == {"vocab": "tensor"}
    gather = get_layout("expert_gather").on(make_mesh(MeshShape(tensor=2)))
    assert (gather.rows_axis, gather.dispatch, gather.mesh_axis("expert_ffn")) == (None, "all_reduce", "tensor")


def test_layouts_are_frozen() -> None:
    rules = {"vocab": "tensor"}
    layout = ShardingLayout("mine", rules)
    rules["ffn"] = "tensor"
    assert dict(layout.rules) == {"vocab": "tensor"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        layout.rules["ffn"] = "tensor"  # pyright: ignore[reportIndexIssue]
