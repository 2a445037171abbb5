"""Engines whose devices share the tokens of hidden states: the answers of one device, and the collectives as stated."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, ConfigError, EngineConfig, PoolingParams, RequestOutput, SamplingParams
from jaxserve.device.buckets import Buckets
from jaxserve.device.build import plan_engine
from jaxserve.device.split_steps import trace_model
from jaxserve.device.steps import trace_step
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Scope
from jaxserve.models.abstract import outline
from pallas_kernels import native_library
from sharding import get_layout
from sharding.plan import compiled_collectives, count_collectives, stated_collectives
from tests.jaxserve.test_draft_requests import REQUESTS as DRAFTED
from tests.jaxserve.test_draft_requests import Run, check_same
from tests.jaxserve.test_lanes import value
from tests.jaxserve.test_request_mix import REQUESTS, answers_alone, outcome, scores
from tests.random_checkpoint import LLAMA, write_checkpoint, write_checkpoint_with_tokenizer
from tests.tiny_programs import NUM_LAYERS, latent_config, make_program, sparse_config, tiny_config

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 360,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 5,
    "max_num_batched_tokens": 45,
    "max_model_len": 128,
    "block_size": 8,
    "compile_sizes": {"decode": [2, 5], "mixed": [45]},
    "compilation_cache_dir": "",
}
ENGINES: dict[str, dict[str, Any]] = {
    "two": {"tensor_parallel_size": 2},
    "four": {"tensor_parallel_size": 4, "kernels": "xla"},
    "deterministic": {"tensor_parallel_size": 2, "deterministic": True},
    "deterministic on eight": {"tensor_parallel_size": 8, "deterministic": True},
}
FAST = ("four", "deterministic")
CONFIGS: dict[str, ModelConfig] = {"dense": tiny_config(), "sparse": sparse_config(), "latents": latent_config()}
NATIVE = DtypePolicy(linear="native", grouped="native")
BUCKETS = Buckets(decode_rows=(2, 16), mixed_tokens=(16, 24), max_num_seqs=16, table_pages=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and the demo's tokenizer."""
    directory = tmp_path_factory.mktemp("gemma3")
    write_checkpoint_with_tokenizer(directory, CONFIG, seed=1)
    return directory


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[LLM]:
    """An engine on one device."""
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole: LLM) -> list[RequestOutput]:
    """Each request alone, on one device."""
    return answers_alone(whole)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in ENGINES],
)
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    """An engine whose devices share tokens; after the tests nothing has compiled, and no page is in use."""
    with LLM(str(model), **SETTINGS, **ENGINES[request.param], layout="sequence_parallel") as made:
        yield made
        assert value(made, "compiles_after_ready") == value(made, "kv_cache_usage_perc") == 0


def test_requests_of_every_kind_are_as_on_one_device(llm: LLM, expected: list[RequestOutput]) -> None:
    """With prompt logprobs too; a deterministic engine gives the bits that each request has alone."""
    order = random.Random(3).sample(range(len(REQUESTS)), len(REQUESTS))
    pairs = [(REQUESTS[index][0], SamplingParams(**REQUESTS[index][1])) for index in order]
    found = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    for index, output in zip(order, found, strict=True):
        assert outcome(output) == outcome(expected[index]), REQUESTS[index]
        assert scores(output) == pytest.approx(scores(expected[index]), abs=1e-3)
    assert any(output.prompt_logprobs for output in found)
    if llm.config.deterministic:
        llm.reset_prefix_cache()
        for (prompt, params), output in zip(pairs, found, strict=True):
            (alone,) = llm.generate(prompt, params, use_tqdm=False)
            assert scores(alone) == scores(output)


def test_vectors_are_those_of_one_device(llm: LLM, whole: LLM) -> None:
    prompts = ["reverse garden:", "count the trees of the long street:", "5+6=", "sort 3 2 1: " * 5]
    for pooling in ("last", "mean"):
        one, other = (
            each.embed(prompts, use_tqdm=False, pooling_params=PoolingParams(pooling=pooling)) for each in (llm, whole)
        )
        for output, wanted in zip(one, other, strict=True):
            assert output.outputs.embedding == pytest.approx(wanted.outputs.embedding, rel=1e-4, abs=1e-5)


def test_mixed_shapes_divide_by_the_devices(llm: LLM) -> None:
    """45 tokens are no multiple of 2, 4 or 8; 2 rows are too few to be shared, unless each must have the same bits."""
    program, size = llm.plan.models[0], llm.config.tensor_parallel_size
    few, *_, largest = llm.plan.buckets.shapes()
    assert largest.num_tokens % size == 0 and 45 <= largest.num_tokens < 45 + 8
    assert program.for_shape(largest) is program and program.layout.residual == "tokens"
    assert program.for_shape(few).layout.residual == ("tokens" if llm.config.deterministic else "replicated")


@pytest.mark.slow
def test_drafts_change_no_bit() -> None:
    run = Run(tensor_parallel_size=2, layout="sequence_parallel", deterministic=True)
    expected = run.without_drafts(DRAFTED)
    check_same(run.answers("mixed", DRAFTED), expected)
    run.engine.close()


@pytest.mark.parametrize(
    ("model", "is_split"), [("dense", False), ("dense", True), ("sparse", True), ("latents", True)]
)
def test_steps_communicate_what_the_layout_states(model: str, is_split: bool) -> None:
    """Shapes with few tokens, or no multiple of the devices, as tensor_parallel; XLA keeps scatters and gathers."""
    program = make_program(CONFIGS[model], tensor=4, layout="sequence_parallel")
    num_sparse = int(model != "dense")
    text, stated = None, {}
    for shape in BUCKETS.shapes():
        used = program.for_shape(shape)
        traced = trace_model(program, shape, 24) if is_split else trace_step(program, shape, "any")
        stated = stated_collectives(used.layout, NUM_LAYERS, num_sparse)
        assert count_collectives(traced) == stated, shape
        assert used is program.for_shape(shape)
        if shape.num_tokens < 16:
            assert stated == stated_collectives(get_layout("tensor_parallel"), NUM_LAYERS, num_sparse)
            assert "reduce-scatter" not in stated
        else:
            assert stated == {"reduce-scatter": 2 * NUM_LAYERS + 1, "all-gather": 2 * NUM_LAYERS + 2}
        text = traced.lower().compile().as_text() if shape.num_tokens == 24 else text
    assert text is not None and compiled_collectives(text) == stated


def test_a_shape_that_devices_cannot_share_equally_stays_whole() -> None:
    program = make_program(tiny_config(), tensor=4, layout="sequence_parallel")
    odd = Buckets((18,), (18,), 18, 4).shapes()
    assert [program.for_shape(shape).layout.residual for shape in odd] == ["replicated"] * 2
    assert program.for_shape(odd[0]) is program.for_shape(odd[1])


def test_in_deterministic_mode_every_step_is_split() -> None:
    """So that a token is computed in the same way among few and among many."""
    program = make_program(tiny_config(), tensor=4, layout="sequence_parallel", row_tile=8)
    for shape in Buckets((8,), (8, 32), 8, 4, 8).shapes():
        assert program.for_shape(shape) is program


def test_no_kernel_fuses_the_norm_before_a_gather() -> None:
    for size, is_fused in ((1, True), (2, False)):
        program = make_program(sparse_config(), tensor=size, layout="sequence_parallel", policy=NATIVE)
        dense, sparse = outline(program.config, Scope(parallel=program.parallel, policy=NATIVE)).layers
        parts = [dense.attention, dense.mlp, sparse.attention, sparse.mlp]
        assert [part.has_fused_norms for part in parts] == [is_fused] * 4


def test_tiles_that_devices_cannot_share_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3}, seed=1)
    settings: dict[str, Any] = {"model": str(tmp_path), "tensor_parallel_size": 3, "layout": "sequence_parallel"}
    message = "deterministic=True computes tiles of 8 tokens, .* splits over tensor_parallel_size=3; use a .*_size of"
    with pytest.raises(ConfigError, match=f"{message} 1, 2, 4, 8, or another layout"):
        plan_engine(EngineConfig(**settings, deterministic=True))
    plan = plan_engine(EngineConfig(**settings))
    assert all(shape.num_tokens % 3 == 0 for shape in plan.buckets.shapes() if not shape.decode_only)


@pytest.mark.skipif(native_library.unavailable() is not None, reason="needs native kernels")
def test_the_same_bits_are_promised_only_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Normalization outside the native kernels depends on the shape of a step."""
    write_checkpoint(tmp_path, LLAMA, seed=1)
    settings: dict[str, Any] = {"model": str(tmp_path), "tensor_parallel_size": 2, "kernels": "native"}
    for layout, expected in (("tensor_parallel", None), ("sequence_parallel", 8)):
        for deterministic in (None, True):
            caplog.clear()
            with caplog.at_level("INFO"):
                plan = plan_engine(EngineConfig(**settings, layout=layout, deterministic=deterministic))
            assert plan.models[0].layer_tile == (expected if deterministic else None)
            promised = bool(deterministic) or expected is None
            assert ("Results are batch-invariant" in caplog.text) == promised
