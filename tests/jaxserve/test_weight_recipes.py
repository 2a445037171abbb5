"""Weight recipes: real tensor lists are used up exactly, and rows land where a per-device construction puts them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from checkpoints import CheckpointError, TensorInfo, TensorRecipe, check_recipes
from checkpoints.quantized.reader import logical_names
from checkpoints.quantized.registry import format_for
from checkpoints.quantized.settings import read_settings
from jaxserve.api.errors import ConfigError
from jaxserve.layers.parallel import Parallel, Scope
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.hf_config import read_config_json
from jaxserve.models.registry import config_from_hf
from sharding import get_layout
from tests.copied_pieces import copy_piece

REAL_CONFIGS = [
    "gemma-2b-it",
    "llama-2-13b-bnb-nf4",
    "llama-2-7b",
    "llama-3.1-70b",
    "llama-3.1-8b-instruct-bnb-int8",
    "llama-3.2-3b-one-tensor-per-shard",
    "mistral-small-24b-dolphin3",
    "mixtral-8x22b-wizardlm2",
    "phi-3-mini",
    "qwen2.5-14b-cogito",
    "qwen3-1.7b",
    "qwen3-14b-mlx-4bit",
    "smollm3-3b",
    "yi-1.5-6b",
]
WITHOUT_AN_INDEX = ["baichuan-7b", "deepseek-r1", "granite-3.1-1b-a400m-moe", "kimi-k2", "qwen3.5-25b-a3b-moe"]
ARCHITECTURES = [
    "BaiChuanForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
]
HEAD_DIM, WIDTH, FFN, VOCABULARY, NUM_HEADS = 6, 10, 12, 13, 8


def abstract(config: DecoderConfig, size: int, layout: str = "tensor_parallel") -> AbstractModel:
    parallel = Parallel.from_layout(get_layout(layout), size) if size > 1 else Parallel()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return abstract_model(config, Scope(parallel=dataclasses.replace(parallel, size=size)), lambda axes: device)


def weight_recipes(config: DecoderConfig, size: int) -> dict[str, TensorRecipe]:
    return abstract(config, size).recipes


def ignored_patterns(config: DecoderConfig) -> tuple[str, ...]:
    return abstract(config, 1).ignored


def param_shapes(config: DecoderConfig, size: int) -> dict[str, tuple[int, ...]]:
    """Of the module's arrays, stored as they are."""
    return {path: struct.shape for path, struct in abstract(config, size).params.items()}


def read_folder(folder: Path) -> DecoderConfig:
    path = folder / "config.json"
    return cast(DecoderConfig, config_from_hf(read_config_json(path), str(path)))


def index_names(path: Path) -> dict[str, TensorInfo | None]:
    names = json.loads(path.read_text())["weight_map"]
    settings = read_settings(path.parent)
    return dict.fromkeys(names if settings is None else logical_names(names, format_for(settings)))


def tiny(architecture: str, num_kv_heads: int = 4, **raw: Any) -> DecoderConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
    }
    return cast(DecoderConfig, config_from_hf({"architectures": [architecture], **sizes, **raw}, "config.json"))


def checkpoint_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Random tensors in the names and shapes that a plan on one device asks for; every element is different."""
    recipes = weight_recipes(config, 1)
    shapes = dict(source for recipe in recipes.values() for source in recipe.sources)
    rng = np.random.default_rng(0)
    return {name: rng.permutation(int(np.prod(shape))).reshape(shape) + 1.0 for name, shape in shapes.items()}


def assemble(recipe: TensorRecipe, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What a loader makes of a recipe, in plain numpy."""
    for name, shape in recipe.sources:
        assert tensors[name].shape == shape
    array = np.zeros(recipe.shape)
    covered = np.zeros(recipe.shape, int)
    for piece in recipe.pieces:
        covered[copy_piece(piece, tensors, array)] += 1
    assert covered.max() <= 1
    return array


def projections(config: DecoderConfig, tensors: dict[str, np.ndarray], suffix: str) -> dict[str, np.ndarray]:
    """Layer 1's five input projections, cut out of fused tensors where the family fuses."""
    prefix = "model.layers.1."
    query, key_value = NUM_HEADS * HEAD_DIM, config.num_kv_heads * HEAD_DIM
    fused = {"Phi3ForCausalLM": "self_attn.qkv_proj", "BaiChuanForCausalLM": "self_attn.W_pack"}
    if config.architecture in fused:
        qkv = tensors[f"{prefix}{fused[config.architecture]}.{suffix}"]
        q, k, v = np.split(qkv, [query, query + key_value])
    else:
        q, k, v = (tensors[f"{prefix}self_attn.{letter}_proj.{suffix}"] for letter in "qkv")
    if f"{prefix}mlp.gate_up_proj.{suffix}" in tensors:
        gate, up = np.split(tensors[f"{prefix}mlp.gate_up_proj.{suffix}"], 2)
    else:
        gate, up = (tensors.get(f"{prefix}mlp.{kind}_proj.{suffix}", np.zeros(FFN)) for kind in ("gate", "up"))
    return {"q": q, "k": k, "v": v, "gate": gate, "up": up}


def kv_heads_of(config: DecoderConfig, device: int, size: int) -> list[int]:
    """The heads that the device's query heads read, in order."""
    queries = range(device * NUM_HEADS // size, (device + 1) * NUM_HEADS // size)
    group = NUM_HEADS // config.num_kv_heads
    return sorted({query // group for query in queries})


def device_qkv(config: DecoderConfig, parts: dict[str, np.ndarray], device: int, size: int) -> np.ndarray:
    """Rows of one device, head by head."""
    per_head = {name: parts[name].reshape(-1, HEAD_DIM, *parts[name].shape[1:]) for name in "qkv"}
    local = NUM_HEADS // size
    heads = [per_head["q"][head] for head in range(device * local, (device + 1) * local)]
    for name in "kv":
        heads += [per_head[name][head] for head in kv_heads_of(config, device, size)]
    return np.concatenate(heads)


@pytest.mark.parametrize("folder", REAL_CONFIGS)
@pytest.mark.parametrize("size", [1, 4])
def test_real_tensor_lists_are_used_up_exactly(folder: str, size: int, shared_data: Path) -> None:
    config = read_folder(shared_data / "configs" / folder)
    indexes = sorted((shared_data / "configs" / folder).glob("*.index.json"))
    assert indexes
    for index in indexes:
        recipes = weight_recipes(config, size)
        check_recipes(index_names(index), recipes, ignored_patterns(config))


def test_a_multimodal_tensor_list_is_used_up_exactly(shared_data: Path) -> None:
    """Qwen3.5's language model is inside of another."""
    folder = shared_data / "configs" / "qwen3.5-25b-a3b-moe"
    model, tensors = abstract(read_folder(folder), 1), index_names(folder / "model.safetensors.index.json")
    check_recipes(tensors, model.recipes_for(tensors), model.ignored)


def test_every_real_config_of_a_supported_family_is_in_the_list(shared_data: Path) -> None:
    planned = []
    for path in sorted((shared_data / "configs").glob("*/config.json")):
        try:
            read_folder(path.parent)
        except ConfigError:
            continue
        planned.append(path.parent.name)
    assert sorted(planned) == sorted([*REAL_CONFIGS, *WITHOUT_AN_INDEX])


def test_devstral_has_the_tensors_of_its_sibling(shared_data: Path) -> None:
    config = read_folder(shared_data / "configs" / "mistral-small-24b-dolphin3")
    available = index_names(shared_data / "configs" / "devstral-small-2507" / "model.safetensors.index.json")
    check_recipes(available, weight_recipes(config, 8), ignored_patterns(config))


def test_baichuan_7b_plans_the_tensors_of_its_modelling_file(shared_data: Path) -> None:
    config = read_folder(shared_data / "configs" / "baichuan-7b")
    layer_shapes: dict[str, tuple[int, ...]] = {
        "self_attn.W_pack": (12288, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (11008, 4096),
        "mlp.up_proj": (11008, 4096),
        "mlp.down_proj": (4096, 11008),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64000, 4096),
        "lm_head.weight": (64000, 4096),
        "model.norm.weight": (4096,),
    }
    for layer in range(32):
        shapes |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in layer_shapes.items()}
        shapes[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = (64,)
    available = {name: TensorInfo(shape, np.dtype(np.float16)) for name, shape in shapes.items()}
    for size in (1, 2, 8):
        check_recipes(available, weight_recipes(config, size), ignored_patterns(config))


def test_total_parameters_agree_with_the_index(shared_data: Path) -> None:
    folder = shared_data / "configs" / "smollm3-3b"
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_parameters"]
    shapes = param_shapes(read_folder(folder), 1)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == total


def test_a_missing_and_an_unexpected_tensor_are_reported() -> None:
    config = tiny("LlamaForCausalLM", tie_word_embeddings=True)
    available: dict[str, TensorInfo | None] = dict.fromkeys(checkpoint_tensors(config))
    available["lm_head.weight"] = None
    check_recipes(available, weight_recipes(config, 1), ignored_patterns(config))
    available["lm_headXweight"] = available.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"(?s)missing: model.norm.weight .*unexpected: lm_headXweight"):
        check_recipes(available, weight_recipes(config, 1), ignored_patterns(config))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_projections_equal_a_construction_by_device(architecture: str, num_kv_heads: int, size: int) -> None:
    if architecture == "BaiChuanForCausalLM":
        num_kv_heads = NUM_HEADS
    config = tiny(architecture, num_kv_heads)
    tensors = checkpoint_tensors(config)
    recipes = weight_recipes(config, size)
    parts = projections(config, tensors, "weight")
    qkv = assemble(recipes["layers.1.attention.qkv.weight"], tensors)
    by_device = [device_qkv(config, parts, device, size) for device in range(size)]
    np.testing.assert_array_equal(qkv, np.concatenate(by_device))
    assert len({rows.shape for rows in by_device}) == 1
    local = FFN // size
    gate_up = [parts[name][device * local : (device + 1) * local] for device in range(size) for name in ("gate", "up")]
    np.testing.assert_array_equal(assemble(recipes["layers.1.mlp.gate_up.weight"], tensors), np.concatenate(gate_up))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_biases_follow_the_rows_of_their_weights(num_kv_heads: int, size: int) -> None:
    config = tiny("LlamaForCausalLM", num_kv_heads, attention_bias=True, mlp_bias=True)
    tensors = checkpoint_tensors(config)
    recipes = weight_recipes(config, size)
    parts = projections(config, tensors, "bias")
    expected = [device_qkv(config, parts, device, size) for device in range(size)]
    np.testing.assert_array_equal(assemble(recipes["layers.1.attention.qkv.bias"], tensors), np.concatenate(expected))
    halves = [np.split(parts[name], size) for name in ("gate", "up")]
    interleaved = np.concatenate([halves[index][device] for device in range(size) for index in (0, 1)])
    np.testing.assert_array_equal(assemble(recipes["layers.1.mlp.gate_up.bias"], tensors), interleaved)
    for path, module in (("attention.out", "self_attn.o_proj"), ("mlp.down", "mlp.down_proj")):
        bias = assemble(recipes[f"layers.1.{path}.bias"], tensors)
        np.testing.assert_array_equal(bias, tensors[f"model.layers.1.{module}.bias"])


def test_attention_is_whole_where_only_features_are_split() -> None:
    """Not in the order of devices, and no head twice; the rest as where all is split."""
    config = tiny("Olmo2ForCausalLM", 2)
    one, whole = weight_recipes(config, 1), abstract(config, 4, "replicated_attention").recipes
    split = weight_recipes(config, 4)
    for path, recipe in whole.items():
        assert recipe == (one if ".attention." in path else split)[path], path
    assert whole["layers.1.attention.qkv.weight"] != split["layers.1.attention.qkv.weight"]
    assert whole["layers.1.mlp.gate_up.weight"] != one["layers.1.mlp.gate_up.weight"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_devices_that_share_tokens_have_the_rows_of_all_keys_and_values(architecture: str) -> None:
    config = tiny(architecture, 2)
    tensors, recipes = checkpoint_tensors(config), abstract(config, 4, "context_parallel").recipes
    parts = projections(config, tensors, "weight")
    rows = [rows for query in np.split(parts["q"], 4) for rows in (query, parts["k"], parts["v"])]
    np.testing.assert_array_equal(assemble(recipes["layers.1.attention.qkv.weight"], tensors), np.concatenate(rows))
    split = weight_recipes(config, 4)
    assert all(recipe == split[path] for path, recipe in recipes.items() if ".attention.qkv." not in path)


@pytest.mark.parametrize("num_kv_heads", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 4])
def test_norms_of_queries_and_keys(num_kv_heads: int, size: int) -> None:
    olmo = tiny("Olmo2ForCausalLM", num_kv_heads)
    tensors = checkpoint_tensors(olmo)
    recipes = weight_recipes(olmo, size)
    prefix = "model.layers.0.self_attn."
    query = assemble(recipes["layers.0.attention.q_norm.weight"], tensors)
    np.testing.assert_array_equal(query, tensors[f"{prefix}q_norm.weight"])
    heads = tensors[f"{prefix}k_norm.weight"].reshape(-1, HEAD_DIM)
    expected = [heads[head] for device in range(size) for head in kv_heads_of(olmo, device, size)]
    key = assemble(recipes["layers.0.attention.k_norm.weight"], tensors)
    np.testing.assert_array_equal(key, np.concatenate(expected))
    qwen = tiny("Qwen3ForCausalLM", num_kv_heads)
    shapes = param_shapes(qwen, size)
    assert shapes["layers.0.attention.q_norm.weight"] == shapes["layers.0.attention.k_norm.weight"] == (HEAD_DIM,)


def test_olmo2_norms_come_from_after_the_branches() -> None:
    config = tiny("Olmo2ForCausalLM")
    recipes = weight_recipes(config, 1)
    sources = {path: recipes[f"layers.1.{path}.weight"].sources[0][0] for path in ("attention_norm", "mlp_norm")}
    assert sources == {
        "attention_norm": "model.layers.1.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.1.post_feedforward_layernorm.weight",
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_is_padded_with_zero_rows(size: int) -> None:
    config = tiny("LlamaForCausalLM")
    tensors = checkpoint_tensors(config)
    recipes = weight_recipes(config, size)
    for path, name in (("embed.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")):
        array = assemble(recipes[path], tensors)
        assert array.shape[0] % size == 0 and 0 <= array.shape[0] - VOCABULARY < size
        np.testing.assert_array_equal(array[:VOCABULARY], tensors[name])
        assert not array[VOCABULARY:].any()


def test_parameter_paths_and_shapes() -> None:
    shapes = param_shapes(tiny("LlamaForCausalLM", 2, attention_bias=True), 4)
    assert shapes == {
        "embed.weight": (16, WIDTH),
        "head.weight": (16, WIDTH),
        "norm.weight": (WIDTH,),
        **{
            f"layers.{layer}.{path}": shape
            for layer in (0, 1)
            for path, shape in {
                "attention_norm.weight": (WIDTH,),
                "attention.qkv.weight": (4 * (2 + 2) * HEAD_DIM, WIDTH),
                "attention.qkv.bias": (4 * (2 + 2) * HEAD_DIM,),
                "attention.out.weight": (WIDTH, NUM_HEADS * HEAD_DIM),
                "attention.out.bias": (WIDTH,),
                "mlp_norm.weight": (WIDTH,),
                "mlp.gate_up.weight": (2 * FFN, WIDTH),
                "mlp.down.weight": (WIDTH, FFN),
            }.items()
        },
    }
    assert "head.weight" not in param_shapes(tiny("LlamaForCausalLM", tie_word_embeddings=True), 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_do_not_depend_on_how_a_family_names_its_tensors(architecture: str) -> None:
    config = tiny(architecture, NUM_HEADS)
    recipes = weight_recipes(config, 2)
    assert param_shapes(config, 2) == {path: recipe.shape for path, recipe in recipes.items()}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "ffn", "sizes"),
    [
        (8, 4, 12, [1, 2, 4]),
        (8, 1, 16, [1, 2, 4, 8]),
        (12, 6, 24, [1, 2, 3, 6, 12]),
        (12, 4, 24, [1, 2, 4, 12]),
        (9, 3, 7, [1]),
        (64, 8, 28672, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_sizes_that_work(num_heads: int, num_kv_heads: int, ffn: int, sizes: list[int]) -> None:
    config = dataclasses.replace(
        tiny("LlamaForCausalLM"), num_heads=num_heads, num_kv_heads=num_kv_heads, ffn_size=ffn, num_layers=1
    )
    for size in range(1, 20):
        if size in sizes:
            assert len(param_shapes(config, size)) == 9
        else:
            with pytest.raises(
                ConfigError, match=f"tensor_parallel_size={size} does not divide .* of LlamaForCausalLM"
            ):
                weight_recipes(config, size)


@pytest.mark.parametrize("size", [0, -1, 3])
def test_a_size_that_does_not_fit_says_which_do(size: int) -> None:
    with pytest.raises(
        ConfigError,
        match="8 query heads, 4 key/value heads and intermediate_size 12 of LlamaForCausalLM; valid sizes: 1, 2, 4",
    ):
        weight_recipes(tiny("LlamaForCausalLM"), size)


@pytest.mark.parametrize("layout", ["tensor_parallel", "expert_parallel"])
def test_transposed_matrices_of_experts_in_one_tensor(layout: str) -> None:
    """By device, then by expert; a device of several reads its own experts only, or its own features of each."""
    config, num_experts = tiny("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2), 4
    tensors = checkpoint_tensors(config)
    recipes = abstract(config, 2, layout).recipes
    gate_up, down = (tensors[f"model.layers.1.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert (gate_up.shape, down.shape) == ((num_experts, WIDTH, 2 * FFN), (num_experts, FFN, WIDTH))
    rows = gate_up.swapaxes(1, 2)
    parts = np.split(rows, 2, axis=1 if layout == "tensor_parallel" else 0)
    expected = np.concatenate([part.reshape(-1, WIDTH) for part in parts])
    np.testing.assert_array_equal(assemble(recipes["layers.1.mlp.gate_up"], tensors), expected)
    expected = down.swapaxes(1, 2).reshape(-1, FFN)
    np.testing.assert_array_equal(assemble(recipes["layers.1.mlp.down"], tensors), expected)
    if layout == "expert_parallel":
        half = len(expected) // 2
        pieces = [piece for piece in recipes["layers.1.mlp.down"].pieces if piece.target_start[0] < half]
        assert [piece.source_start[0] for piece in pieces] == [0, 1]
