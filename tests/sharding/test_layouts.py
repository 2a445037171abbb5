"""Layouts as data, and one row for each of them: the same logits as replicated, and the collectives it states."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve.device.batch import BatchBuilder
from jaxserve.device.step_batch import BatchShape, LatestTokens, unpack
from jaxserve.device.steps import ModelProgram, attention_settings
from jaxserve.scheduling.plan import PageGrant, Row, Sampling, SlotSetup, StepPlan
from sharding import LAYOUTS, LayoutError, MeshShape, ShardingLayout, get_layout, make_mesh
from sharding.plan import count_collectives
from tests.tiny_programs import NUM_LAYERS, make_program, random_params, sparse_config, tiny_config

ROWS = ["expert_parallel", "replicated", "tensor_parallel"]
DENSE = tiny_config(num_heads=8, hidden_size=32)
CONFIGS = {"dense": DENSE, "sparse": sparse_config(num_heads=8, hidden_size=32)}
SHAPE = BatchShape(num_tokens=16, num_rows=4, table_pages=4, decode_only=False)
PROMPTS = ([3, 50, 7, 21, 0], [52, 9], [1, 2, 3, 4, 5, 6, 7, 8])


def forward(program: ModelProgram) -> jax.stages.Wrapped:
    """Logits of every token of a mixed step, on the program's mesh."""
    abstract = program.abstract_model
    settings = attention_settings(program, SHAPE)

    def body(arrays: tuple[jax.Array, ...], pools: list, buffer: jax.Array) -> jax.Array:
        model = abstract.merge(arrays)
        nothing = LatestTokens(*jnp.zeros((2, program.num_slots), jnp.int32))
        batch = unpack(buffer, SHAPE, nothing, program.page_size, program.num_pages)
        hidden, _, _ = model.hidden(batch.tokens, batch.positions, batch.lengths, pools, batch.attention, settings)
        return model.logits(hidden)

    param_specs = tuple(struct.sharding.spec for struct in abstract.params.values())
    pools = list(program.abstract_state().pools)
    pool_specs = jax.tree.map(lambda struct: struct.sharding.spec, pools)
    wrapped = jax.shard_map(
        body, mesh=program.mesh, in_specs=(param_specs, pool_specs, P()), out_specs=P(), check_vma=False
    )
    return jax.jit(wrapped)


def prompt_buffer(program: ModelProgram) -> np.ndarray:
    """The prompts as prefill rows, a page each."""
    setups = [SlotSetup(slot, Sampling(), 20) for slot in range(len(PROMPTS))]
    grants = [PageGrant(slot, 0, [5 * slot]) for slot in range(len(PROMPTS))]
    prefill = [Row(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    plan = StepPlan(0, setups, grants, prefill)
    builder = BatchBuilder(program.num_slots, SHAPE.table_pages, program.page_size, program.num_pages)
    builder.apply(plan)
    return builder.build(plan, SHAPE, 0)


def logits_and_collectives(program: ModelProgram) -> tuple[np.ndarray, dict[str, int]]:
    """Logits of the prompts' tokens, and what the program communicates."""
    pools = jax.tree.map(
        lambda struct: jax.device_put(np.zeros(struct.shape, struct.dtype), struct.sharding),
        list(program.abstract_state().pools),
    )
    call = forward(program)
    arguments = (random_params(program), pools, prompt_buffer(program))
    traced = call.trace(*arguments)
    logits = traced.lower().compile()(*arguments)
    return np.asarray(logits)[: sum(map(len, PROMPTS))], count_collectives(traced)


@functools.cache
def whole_logits(name: str) -> np.ndarray:
    """Those of one device."""
    return logits_and_collectives(make_program(CONFIGS[name]))[0]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("model", CONFIGS)
def test_layout(model: str, layout: str, num_devices: int) -> None:
    """Two key/value heads: on 4 and 8 devices they are replicated; the vocabulary of 53 is padded."""
    program = make_program(CONFIGS[model], tensor=num_devices, layout=layout)
    logits, counted = logits_and_collectives(program)
    np.testing.assert_allclose(logits, whole_logits(model), atol=2e-5, rtol=2e-5)
    stated = {
        "all-reduce": NUM_LAYERS * program.layout.all_reduces_per_layer + program.layout.all_reduces_per_step,
        "all-gather": program.layout.all_gathers_per_step,
    }
    assert counted == {kind: count for kind, count in stated.items() if count}


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
        LayoutError, match="unknown layout 'tp'; supported layouts: expert_parallel, replicated, tensor_parallel"
    ):
        get_layout("tp")


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
    assert (alone.all_reduces_per_layer, alone.all_reduces_per_step, alone.all_gathers_per_step) == (0, 0, 0)
    assert layout.on(make_mesh(MeshShape(tensor=2))) is layout
    mixed = ShardingLayout("mixed", {"batch": "data", "vocab": "tensor"}).on(make_mesh(MeshShape(tensor=2)))
    assert dict(mixed.rules) == {"vocab": "tensor"}


def test_layouts_are_frozen() -> None:
    rules = {"vocab": "tensor"}
    layout = ShardingLayout("mine", rules)
    rules["ffn"] = "tensor"
    assert dict(layout.rules) == {"vocab": "tensor"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        layout.rules["ffn"] = "tensor"  # pyright: ignore[reportIndexIssue]
