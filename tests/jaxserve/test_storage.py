"""Storage methods: what is multiplied with, given back and planned."""

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.safetensors_reader import SafetensorsReader
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.layers import storage
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.layers.storage import Weight, load_method
from jaxserve.models.abstract import LogicalParam
from jaxserve.models.loading import load_weights, read_model_config
from pallas_kernels import native_library
from tests import int8_storage, switchable
from tests.random_checkpoint import write_checkpoint
from tests.tiny_programs import make_program

METHODS = {"plain": storage.METHODS["plain"], "int8": int8_storage.__name__}
CONFIG: dict[str, Any] = {
    "architectures": [switchable.ARCHITECTURE],
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "norm_after": True,
    "qk_norm": "width",
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "dtype": "float32",
}
SPARSE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "decoder_sparse_step": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _methods(monkeypatch: pytest.MonkeyPatch, switchable_family: None) -> None:
    for name, module in METHODS.items():
        monkeypatch.setitem(storage.METHODS, name, module)


@pytest.fixture(params=[CONFIG, SPARSE], ids=["dense", "sparse"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Random tensors of a model that uses a norm of each kind, and of one with experts."""
    write_checkpoint(tmp_path, request.param, seed=3)
    return tmp_path


def laid_out(
    directory: Path, method: str, tensor: int, kernels: str = "xla", layout: str = "tensor_parallel"
) -> ShardedModel:
    policy = DtypePolicy(storage=method, linear=kernels, grouped=kernels)
    return make_program(read_model_config(directory), tensor=tensor, policy=policy, layout=layout)


def logical_weights(program: ShardedModel, directory: Path) -> dict[str, np.ndarray]:
    """Each parameter as the method gives it back, from its devices' parts of the loaded arrays."""
    model = program.abstract_model
    arrays = dict(zip(model.params, load_weights(directory, model), strict=True))
    found = {}
    for path, param in model.logical.items():
        if param.stored is None:
            found[path] = np.asarray(arrays[path])
            continue
        whole = np.zeros(param.struct.shape, param.struct.dtype)
        names = sorted(load_method(param.stored.method).arrays(param.stored))
        index_of = param.struct.sharding.devices_indices_map(param.struct.shape)
        for device, index in index_of.items():
            parts = {
                name: next(np.asarray(s.data) for s in arrays[array].addressable_shards if s.device == device)
                for name, array in zip(names, param.arrays, strict=True)
            }
            whole[index] = load_method(param.stored.method).restore(param.stored, parts)
        found[path] = whole
    return found


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_the_logical_weights_come_back(checkpoint: Path, method: str, tensor: int) -> None:
    program = laid_out(checkpoint, method, tensor)
    exact = logical_weights(laid_out(checkpoint, "plain", tensor), checkpoint)
    found = logical_weights(program, checkpoint)
    assert found.keys() == exact.keys()
    for path, param in program.abstract_model.logical.items():
        if method == "plain" or param.stored is None:
            np.testing.assert_array_equal(found[path], exact[path])
        else:
            step = np.abs(exact[path]).max(1, keepdims=True) / 127
            assert (np.abs(found[path] - exact[path]) <= step / 2 + 1e-6).all(), path


@pytest.mark.parametrize("method", METHODS)
def test_devices_that_share_experts_read_their_own(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert on each of three ranks, its features on two devices: every element of the checkpoint is read once."""
    write_checkpoint(tmp_path, SPARSE, seed=3)
    policy = DtypePolicy(storage=method)
    program = make_program(read_model_config(tmp_path), tensor=2, expert=3, layout="expert_gather", policy=policy)
    num_read = collections.Counter[str]()
    read = SafetensorsReader.read

    def counted(self: SafetensorsReader, name: str, index: Any) -> np.ndarray:
        found = read(self, name, index)
        num_read[name] += found.size
        return found

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    model = program.abstract_model
    arrays = dict(zip(model.params, load_weights(tmp_path, model), strict=True))
    sources = {name: shape for recipe in model.recipes.values() for name, shape in recipe.sources}
    experts = [name for name in sources if ".experts." in name]
    assert len(experts) == 3 * 3 and all(num_read[name] == np.prod(sources[name]) for name in experts)
    for path, shape in (("gate_up", (1, 2 * 6, 16)), ("down", (1, 16, 6))):
        array = arrays[f"layers.1.mlp.{path}" + (".rows" if method == "int8" else "")]
        assert {shard.data.shape for shard in array.addressable_shards} == {shape}
        assert len({str(shard.index) for shard in array.addressable_shards}) == 6, "no device has another's part"


@pytest.mark.skipif(native_library.unavailable() is not None, reason="needs native kernels")
@pytest.mark.parametrize("checkpoint", [SPARSE | {"num_experts": 4}], ids=["sparse"], indirect=True)
@pytest.mark.parametrize("tensor, layout", [(1, "tensor_parallel"), (2, "tensor_parallel"), (2, "expert_parallel")])
def test_weights_packed_for_native_kernels_come_back(checkpoint: Path, tensor: int, layout: str) -> None:
    """Each device's part on its own: its outputs, its features, or its experts."""
    exact = logical_weights(laid_out(checkpoint, "plain", tensor, layout=layout), checkpoint)
    program = laid_out(checkpoint, "plain", tensor, "native", layout)
    assert program.abstract_model.params["layers.1.mlp.gate_up"].shape[0] == 4
    assert len(program.abstract_model.params["layers.1.mlp.gate_up"].shape) == 5
    found = logical_weights(program, checkpoint)
    assert found.keys() == exact.keys()
    for path, weight in found.items():
        np.testing.assert_array_equal(weight, exact[path], path)


def test_a_method_may_keep_a_weight_in_several_arrays(checkpoint: Path) -> None:
    model = laid_out(checkpoint, "int8", 2).abstract_model
    prefix = "layers.0.attention.out.weight"
    assert model.logical[prefix].arrays == (f"{prefix}.rows", f"{prefix}.scales")
    assert model.params[f"{prefix}.rows"].dtype == np.int8
    assert model.params[f"{prefix}.scales"].shape == (16, 2), "features are split over two devices"
    assert len(model.params) == len(model.logical) + sum(param.stored is not None for param in model.logical.values())


@pytest.mark.parametrize("tensor", [1, 2])
def test_steps_multiply_with_what_is_stored(checkpoint: Path, tensor: int) -> None:
    """Logits with rounded weights are those of a plain model whose weights are the rounded ones."""
    program = laid_out(checkpoint, "int8", tensor)
    rounded = logical_weights(program, checkpoint)
    plain = laid_out(checkpoint, "plain", tensor)
    logits = []
    for each, arrays in (
        (program, load_weights(checkpoint, program.abstract_model)),
        (
            plain,
            tuple(
                jax.device_put(as_stored(rounded[path], plain.abstract_model.logical[path]), struct.sharding)
                for path, struct in plain.abstract_model.params.items()
            ),
        ),
    ):
        logits.append(forward(each, arrays))
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def as_stored(value: np.ndarray, param: LogicalParam) -> np.ndarray:
    """A parameter in the form of the plain method, put together from its devices' parts."""
    if param.stored is None:
        return value
    axis = int(param.stored.parts[1] > 1)
    parts = [param.fill(part, ((0, 0), (0, 0)))[0] for part in np.split(value, max(param.stored.parts), axis)]
    return np.concatenate(parts, axis + (param.stored.experts is not None))


def forward(program: ShardedModel, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """Scores of the vocabulary for some hidden states, from each layer's MLP and the tied head."""
    model = program.abstract_model
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)

    def body(*values: jax.Array) -> jax.Array:
        module = model.merge(values)
        assert module.embed is not None
        hidden = module.embed(jnp.arange(5))
        for layer in module.layers:
            hidden = layer.mlp(hidden + x, residual=hidden)
        return module.logits(hidden)

    structs = tuple(model.params.values())
    return np.asarray(program.trace(body, structs).lower().compile()(*arrays))


def test_the_plan_counts_what_is_stored(checkpoint: Path) -> None:
    for method in METHODS:
        program = laid_out(checkpoint, method, 1)
        held = sum(array.nbytes for array in load_weights(checkpoint, program.abstract_model))
        assert held == sum(s.dtype.itemsize * int(np.prod(s.shape)) for s in program.abstract_model.params.values())


def test_local_sizes() -> None:
    weight = Weight(12, 8, ("ffn", "embed"), (4, 1), "float32", "xla", "plain")
    assert weight.local == (3, 8)
