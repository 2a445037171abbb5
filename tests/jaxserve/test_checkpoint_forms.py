"""Forms in which checkpoints have a model's tensors: without the prefix, without the head, tied under either name."""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, Listing, TensorInfo, check_recipes, convert
from jaxserve import LLM, BeamSearchParams, RequestError, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, UnsupportedModelError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.dummy_weights import DummyReader
from jaxserve.models.loading import check_weights, known_listings, load_model, read_model_config
from jaxserve.models.output_head import choose_head
from jaxserve.models.registry import FAMILIES, config_from_hf, without_head
from jaxserve.models.text_half import TEXT_HALVES
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint
from tests.recurrent_fields import with_recurrent_fields

F32 = np.dtype(np.float32)
SMALL: dict[str, Any] = {
    **DEEPSEEK,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 1,
    "n_positions": 64,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compilation_cache_dir": "",
    "warm_up": False,
}


def read(architecture: str, **fields: Any) -> ModelConfig:
    raw = with_recurrent_fields({**SMALL, "architectures": [architecture], **fields})
    if architecture == "BaichuanForCausalLM":
        raw |= {"hidden_size": 4096}
    return config_from_hf(raw, "config.json")


def abstract(config: ModelConfig) -> AbstractModel:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return abstract_model(config, Scope(), lambda axes: device)


def check(model: AbstractModel, tensors: Listing) -> None:
    infos = {name: TensorInfo(shape, F32) for name, shape in tensors.items()}
    check_recipes(infos, model.recipes_for(infos), model.ignored)


NAMES = {
    "GPT2LMHeadModel": ("transformer.", "wte.weight", "lm_head.weight"),
    "OPTForCausalLM": ("model.", "decoder.embed_tokens.weight", "lm_head.weight"),
    "GPTBigCodeForCausalLM": ("transformer.", "wte.weight", "lm_head.weight"),
    "GPTNeoForCausalLM": ("transformer.", "wte.weight", "lm_head.weight"),
    "GPTJForCausalLM": ("transformer.", "wte.weight", "lm_head.weight"),
    "GPTNeoXForCausalLM": ("gpt_neox.", "embed_in.weight", "embed_out.weight"),
    "Mamba2ForCausalLM": ("backbone.", "embeddings.weight", "lm_head.weight"),
    "NemotronHForCausalLM": ("backbone.", "embeddings.weight", "lm_head.weight"),
}
"""Prefix, embedding and head of the families with names of their own."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_loads_in_every_form(architecture: str) -> None:
    prefix, embedding, head = NAMES.get(architecture, ("model.", "embed_tokens.weight", "lm_head.weight"))
    model = abstract(read(architecture, tie_word_embeddings=True))
    usual = model.listings[0]
    assert all(name.startswith(prefix) for name in usual)
    for start in (prefix, ""):
        form = {start + name.removeprefix(prefix): shape for name, shape in usual.items()}
        check(model, form)
        check(model, {**form, head: form[start + embedding]})
        check(model, {head if name == start + embedding else name: shape for name, shape in form.items()})
        if any("rotary_emb" in pattern for pattern in model.ignored):
            buffer = "rotary_emb.inv_freq"
            names = (f"{start}layers.0.attention.{buffer}",) + ((start + buffer,) if architecture not in NAMES else ())
            check(model, {**form, **dict.fromkeys(names, (8,))})
        with pytest.raises(CheckpointError, match="1 missing"):
            check(model, {name: shape for name, shape in form.items() if name != start + embedding})


HALVES = [(whole, kind) for whole, half in TEXT_HALVES.items() for kind in half.families]


@pytest.mark.parametrize(("whole", "kind"), HALVES)
def test_every_text_half_loads_in_every_form(whole: str, kind: str) -> None:
    """Beside tensors of its encoders; a tensor of text that is left over or lost is named, whatever is ignored."""
    fields = {name: value for name, value in SMALL.items() if name != "architectures"}
    raw = {"architectures": [whole], "text_config": {**fields, "model_type": kind}, "tie_word_embeddings": True}
    model = abstract(config_from_hf(raw, "config.json"))
    others = {f"{name}.layers.0.weight": (3,) for name in TEXT_HALVES[whole].others}
    for prefix in ("model.language_model.", "language_model.model.", "model.language_model.model.", "model.", ""):
        form = {prefix + name.removeprefix("model."): shape for name, shape in model.listings[0].items()}
        assert not [name for name in form if any(re.fullmatch(pattern, name) for pattern in model.ignored)]
        for start in ("", "model."):
            check(model, {**form, **{start + name: shape for name, shape in others.items()}})
        lost = next(iter(form))
        extra = f"{prefix}layers.0.self_attn.extra.weight"
        text = rf"1 missing, 1 unexpected\n.* missing: {re.escape(lost)} .*\n.* unexpected: {re.escape(extra)}$"
        with pytest.raises(CheckpointError, match=text):
            check(model, {**{name: shape for name, shape in form.items() if name != lost}, **others, extra: (1,)})


@pytest.mark.parametrize("whole", TEXT_HALVES)
def test_every_text_half_has_a_class_without_head(whole: str) -> None:
    """With the fields of text in their own object, or beside the encoder's."""
    stem = whole.removesuffix("ForConditionalGeneration")
    fields = {**SMALL, "architectures": [f"{stem}Model"]}
    nested = {**fields, "text_config": {**SMALL, "model_type": next(iter(TEXT_HALVES[whole].families))}}
    flat = [fields] if stem.startswith("Qwen2") else []
    for raw in [nested, *flat]:
        config = config_from_hf(raw, "config.json")
        assert (config.multimodal, config.has_head, config.tie_embeddings) == (whole, False, True)
        check(abstract(config), abstract(config).listings[1])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_a_class_without_head(architecture: str) -> None:
    stem = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    config = read(f"{stem}Model", tie_word_embeddings=False) if stem != "Baichuan" else None
    if config is None:
        return
    assert config == dataclasses.replace(
        read(architecture, tie_word_embeddings=False), has_head=False, tie_embeddings=True
    )
    model = abstract(config)
    num_forms = 3 if NAMES.get(architecture, ("",))[0] == "backbone." else 2
    num_forms *= 2 if architecture == "KimiLinearForCausalLM" else 1  # with other names of dense layers' MLPs
    assert len(model.listings) == num_forms, "a head's tensor is no embedding"
    check(model, model.listings[1])


def test_what_is_no_model_is_not_known_by_its_ending() -> None:
    for name in ("BertModel", "Model", "Qwen3ForSequenceClassification"):
        with pytest.raises(UnsupportedModelError, match=f"architecture {name} is not supported"):
            read(name)


def test_extra_layers_of_deepseek_are_ignored_without_the_prefix() -> None:
    model = abstract(read("DeepseekV3ForCausalLM", num_nextn_predict_layers=1))
    check(model, {**model.listings[1], "layers.1.eh_proj.weight": (1,)})


# ------------------------------------------------------------------------------------------------ files


def rewrite(directory: Path, target: Path, names: dict[str, str | None], **fields: Any) -> Path:
    """Writes a checkpoint's tensors under other names, None for not at all, and its config with other fields."""
    target.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    tensors = load_file(directory / "model.safetensors")
    kept = {names.get(name, name): array for name, array in tensors.items()}
    save_file({name: array for name, array in kept.items() if name is not None}, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    write_checkpoint(directory, LLAMA, 0)
    return directory


@pytest.fixture(scope="module")
def short(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved without its head, as embedding models are."""
    names: dict[str, str | None] = {
        name: name.removeprefix("model.") for name in load_file(untied / "model.safetensors")
    }
    return rewrite(untied, tmp_path_factory.mktemp("forms") / "short", {**names, "lm_head.weight": None})


def test_the_head_is_that_of_the_files(untied: Path, short: Path, tmp_path: Path) -> None:
    config = read_model_config(untied)
    assert choose_head(config, untied) == config == choose_head(config, untied, "generate")
    assert choose_head(config, untied, "pooling") == without_head(config)
    assert choose_head(config, short) == without_head(config) == choose_head(config, short, "pooling")
    with pytest.raises(ConfigError, match="runner='generate' needs an output head, .* saved without one"):
        choose_head(config, short, "generate")
    assert choose_head(config, short, "generate", "dummy") == config
    lost = rewrite(untied, tmp_path / "lost", {"lm_head.weight": None})
    assert choose_head(config, lost) == config, "a head that is lost is missing"
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        check_weights(lost, abstract(config))
    check_weights(lost, abstract(choose_head(config, lost, "pooling")))
    assert choose_head(config, tmp_path) == config, "check_weights says that nothing is there"


def weights_of(directory: Path) -> dict[str, np.ndarray]:
    """The parameters of the loaded model by path."""
    state = nnx.to_flat_state(nnx.state(load_model(directory, "float32")))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in state}


def test_tied_weights_that_differ_are_two(untied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers 5; equal ones are one."""
    both = rewrite(untied, tmp_path / "both", {}, tie_word_embeddings=True)
    found, expected = weights_of(both), weights_of(untied)
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(found["head.weight"], expected["head.weight"])
    assert "lm_head.weight and model.embed_tokens.weight differ" in caplog.text
    config = read_model_config(both)
    tensors = load_file(both / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, both / "model.safetensors")
    assert choose_head(config, both) == config and config.tie_embeddings


def test_weights_are_the_same_in_every_form(untied: Path, short: Path, tmp_path: Path) -> None:
    names: dict[str, str | None] = {"lm_head.weight": None}
    usual = rewrite(untied, tmp_path / "usual", names, tie_word_embeddings=True)
    head = rewrite(usual, tmp_path / "head", {"model.embed_tokens.weight": "lm_head.weight"})
    expected = weights_of(usual)
    for directory in (head, short):
        found = weights_of(directory)
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(found[path], array)


def test_an_engine_for_embeddings_alone(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(str(short), **SETTINGS) as llm:
        assert np.linalg.norm(llm.embed([[1, 2, 3]])[0].outputs.embedding) == pytest.approx(1.0)
        message = "computes embeddings only: it runs with runner='pooling', or the checkpoint has no output head"
        with pytest.raises(RequestError, match=message):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match=message):
            next(llm.stream([1, 2, 3]))
        with pytest.raises(RequestError, match=message):
            llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert "saved without an output head: the engine computes embeddings only" in caplog.text


def test_convert_finds_the_model_of_the_config(untied: Path, tmp_path: Path) -> None:
    """Beside another model's tensors, with the same endings of their names."""
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    tensors = load_file(untied / "model.safetensors")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((untied / "config.json").read_bytes())
    save_file({"model.embed_tokens.weight": np.zeros((3, 3), np.float32)}, source / "draft.safetensors")
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, source / "pytorch_model.bin")
    convert(source, tmp_path / "new", "safetensors", listings=known_listings(source))
    converted = load_file(tmp_path / "new" / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert known_listings(tmp_path) is None
    check_weights(source, abstract(read_model_config(source)))


# ------------------------------------------------------------------------------------------------ dummy weights


def test_dummy_weights_are_the_same_in_any_parts() -> None:
    reader = DummyReader({"a": (7, 300, 500), "b": (7, 300, 500), "c": ()})
    whole = reader.read("a", (slice(0, 7), slice(0, 300), slice(0, 500)))
    part = reader.read("a", (slice(2, 5), slice(100, 101), slice(3, 499)))
    np.testing.assert_array_equal(part, whole[2:5, 100:101, 3:499])
    assert abs(whole).max() <= 1e-3 and len(np.unique(whole)) > 60_000
    assert (whole != reader.read("b", (slice(0, 7), slice(0, 300), slice(0, 500)))).any()
    assert reader.read("c", ()).shape == ()


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = EngineConfig.from_arguments(str(tmp_path), load_format="dummy")
    assert config.load_format == "dummy"
    with LLM(str(tmp_path), **SETTINGS, load_format="dummy", enable_chunked_prefill=False, max_model_len=16) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3
