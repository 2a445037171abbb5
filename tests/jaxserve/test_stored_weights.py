"""Quantized weights that stay as they are in the file: what the engine computes with them, moves and plans."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.quantized.on_load import METHODS
from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import METHODS as NAMES
from jaxserve.api.quantization import SHORT_NAMES
from jaxserve.cli import main
from jaxserve.device.build import load_params
from jaxserve.reshard.resident_weights import check_same_parameters, move_weights
from pallas_kernels.native_library import unavailable
from tests.checkpoints.quantized.test_gguf_blocks import decode as decoded
from tests.gguf_files import write_gguf
from tests.gguf_models import metadata_of, random_store, to_gguf
from tests.jaxserve.reshard.test_reshard import contents, make_plan
from tests.jaxserve.test_gguf_models import BASE
from tests.jaxserve.test_quantized_checkpoints import DENSE, EXPERTS, FUSED, QWEN, write, write_gpt_oss
from tests.quantized_cases import CASES
from tests.random_checkpoint import write_checkpoint

STORED, DECODED = {"quantization_config": {"weights": "stored"}}, {"quantization_config": {"weights": "decoded"}}
COMMON: dict[str, Any] = {
    **{"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8},
    **{"num_gpu_blocks_override": 24},
}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
NOT_KEPT = ("nf4, blocks across rows",)

IN_GATE = ("compressed-tensors int8", "compressed-tensors 3 bits with zeros", "fp8 blocks, ragged", "gptq act-order")


def generated(llm: LLM) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]


def check_same(found: list[Any], expected: list[Any]) -> None:
    """The same tokens, and log-probabilities within what the order of sums explains."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, own in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(
                [mine[token].logprob for token in sorted(mine)],
                [own[token].logprob for token in sorted(own)],
                atol=1e-4,
            )


def compared(folder: Path, model: dict[str, Any], case: str, **settings: Any) -> None:
    _, quantized = write(folder, model, CASES[case])
    outputs = []
    for choice in (DECODED, STORED):
        with LLM(str(quantized), warm_up=False, **COMMON, **choice, **settings) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


def marked(names: Iterable[str], in_gate: Collection[str]) -> list[Any]:
    """Names as parameters, slow but for those that the gate runs."""
    return [pytest.param(name, marks=[] if name in in_gate else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("case", marked([case for case in CASES if case not in NOT_KEPT], IN_GATE))
def test_stored_weights_compute_what_decoded_ones_do(case: str, tmp_path: Path) -> None:
    compared(tmp_path, {**DENSE, "num_hidden_layers": 1}, case, tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kernels": "xla"}, {"quantization_config": {"activations": "int8"}}], ids=str)
def test_sorted_features_are_those_of_each_kernel(settings: dict[str, Any], tmp_path: Path) -> None:
    """Devices have other numbers of each group's features."""
    model = {**DENSE, "num_hidden_layers": 1, "num_key_value_heads": 4}
    _, quantized = write(tmp_path, model, CASES["gptq act-order"])
    outputs = []
    for tensor in (1, 2, 4):
        with LLM(str(quantized), warm_up=False, tensor_parallel_size=tensor, **COMMON, **STORED | settings) as llm:
            outputs.append(generated(llm))
    assert_near(outputs[1], outputs[0], 0.1 if "kernels" not in settings else 1e-4)
    assert_near(outputs[2], outputs[0], 0.1 if "kernels" not in settings else 1e-4)


@pytest.mark.parametrize("case", marked(["compressed-tensors int8", "gptq 4 bits"], ("gptq 4 bits",)))
@pytest.mark.parametrize("model", marked(["tied", "fused"], ("tied",)))
def test_tied_and_fused_weights(model: str, case: str, tmp_path: Path) -> None:
    compared(tmp_path, {"tied": QWEN, "fused": FUSED}[model], case, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}]
)
@pytest.mark.parametrize("case", marked(["awq", "compressed-tensors int8 groups"], ("awq",)))
def test_experts(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    compared(tmp_path, EXPERTS, case, **settings)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Rows of records are columns of the tensors, which have the experts' matrices transposed."""
    _, quantized, _ = write_gpt_oss(tmp_path)
    outputs = []
    for choice in (DECODED, STORED):
        with LLM(str(quantized), warm_up=False, max_model_len=64, **COMMON, **choice) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


@pytest.mark.parametrize("names", marked(["q_proj v_proj", "gate_proj"], ("q_proj v_proj",)))
def test_projections_of_one_matmul_that_differ(names: str, tmp_path: Path) -> None:
    """Types of blocks are mixed in one projection of queries, keys and values, and in one of gates and the others."""
    config = {**BASE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    write_checkpoint(tmp_path, config, seed=3)
    kinds = {f"{name}": ("Q6_K", 14, 256, 210) for name in names.split()} | {"": ("Q4_K", 12, 256, 144)}
    tensors, _ = to_gguf("llama", config, load_file(tmp_path / "model.safetensors"), random_store(kinds, decoded))
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama", config), tensors)
    outputs = []
    for choice in (DECODED, STORED):
        with LLM(str(path), warm_up=False, tensor_parallel_size=2, **COMMON, **choice) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


@pytest.mark.parametrize("case", ["gptq 4 bits", "gptq act-order", "fp8 blocks, ragged"])
def test_weights_move_bit_for_bit(case: str, tmp_path: Path) -> None:
    """On each mesh they are those that loading puts there; a record on one device is four on four devices."""
    sizes = {"num_key_value_heads": 4, "intermediate_size": 96, "num_hidden_layers": 1}
    _, quantized = write(tmp_path, {**DENSE, **sizes}, CASES[case])
    now = make_plan(quantized, **STORED)
    spans = {param.span for param in now.models[0].abstract_model.logical.values()}
    held = [[load_params(now, program) for program in now.models]]
    begin = [contents(found) for found in held[0]]
    for tensor in (2, 4, 1):
        new = make_plan(quantized, tensor_parallel_size=tensor, **STORED)
        spans |= {param.span for param in new.models[0].abstract_model.logical.values()}
        check_same_parameters(now.replicas[0], new.replicas[0])
        held = move_weights([[*zip(now.replicas[0], held.pop(0), strict=True)]], new.replicas)
        now = new
        for found, program in zip([stage for stages in held for stage in stages], now.models, strict=True):
            assert contents(found) == contents(load_params(now, program)), tensor
    assert [contents(found) for found in held[0]] == begin
    assert spans == ({None, 16} if case == "gptq act-order" else {None, 8, 16})  # sorted features are filled up


def test_a_running_engine_moves(tmp_path: Path) -> None:
    _, quantized = write(tmp_path, DENSE, CASES["compressed-tensors int8"])
    with LLM(str(quantized), warm_up=False, **COMMON, **STORED) as llm:
        outputs = generated(llm)
        llm.reshard("stage=2,tensor=2")
        check_same(generated(llm), outputs)


@pytest.mark.parametrize("method", marked([*METHODS, "fp8"], ("int8_w8a8", "int4_group")))
def test_float_weights_are_quantized_while_they_are_loaded(method: str, tmp_path: Path) -> None:
    """Logits are near those of the floats, and the same on two devices."""
    write_checkpoint(tmp_path, {**DENSE, "num_hidden_layers": 1}, seed=5)
    found = []
    for settings in ({}, {"quantization": method}, {"quantization": method, "tensor_parallel_size": 2}):
        with LLM(str(tmp_path), warm_up=False, **COMMON, **settings) as llm:
            found.append(generated(llm))
    floats, one, two = found
    if METHODS[SHORT_NAMES.get(method, method)].rounds_activations:
        assert_near(two, one, 0.1)  # each device rounds its part of a row by itself
    else:
        check_same(two, one)
    if method != "int4_group":  # which is coarse for a matrix of this size
        assert_near(one, floats, 1.0)
    assert any(a.logprobs != b.logprobs for a, b in zip(one, floats, strict=True))


@pytest.mark.parametrize("method", marked(METHODS, ("int4_group",)))
def test_what_is_written_quantized_is_what_loading_makes(method: str, tmp_path: Path) -> None:
    """Answers are equal bit for bit, so that codes and scales are the same."""
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    write_checkpoint(source, {**DENSE, "num_hidden_layers": 1, "intermediate_size": 64}, seed=5)
    main(["convert", str(source), str(destination), "--format", "safetensors", "--quantization", method])
    outputs = []
    for directory, settings in ((source, {"quantization": method}), (destination, STORED)):
        with LLM(str(directory), warm_up=False, **COMMON, **settings) as llm:
            outputs.append(generated(llm))
    for one, other in zip(*outputs, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
    with pytest.raises(SystemExit):
        main(["convert", str(destination), str(tmp_path / "x"), "--format", "safetensors", "--quantization", method])


def assert_near(found: list[Any], expected: list[Any], most: float) -> None:
    """The first token's log-probabilities differ by little."""
    for one, other in zip(found, expected, strict=True):
        mine, own = one.logprobs[0], other.logprobs[0]
        common = mine.keys() & own.keys()
        assert common
        assert max(abs(mine[token].logprob - own[token].logprob) for token in common) < most


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    plain, quantized = write(tmp_path, DENSE, CASES["awq"])
    with pytest.raises(ConfigError, match="are quantized with awq already; leave quantization out"):
        LLM(str(quantized), quantization="int8_w8a8")
    with pytest.raises(ConfigError, match="leave one of both out"):
        LLM(str(plain), quantization="int4_group", **DECODED)
    with pytest.raises(ConfigError, match="unknown key 'activation'; did you mean 'activations'"):
        LLM(str(plain), quantization_config={"activation": "int8"})
    with pytest.raises(
        ConfigError, match=r"quantization_config.weights: expected one of 'auto', 'stored', 'decoded', got 'x'"
    ):
        LLM(str(plain), quantization_config={"weights": "x"})


@pytest.mark.skipif(unavailable() is not None, reason="needs the native kernels")
def test_forms_that_the_chosen_kernels_lack(tmp_path: Path) -> None:
    """Values of NF4 are no integers that rounded rows can be multiplied with."""
    _, quantized = write(tmp_path, DENSE, CASES["nf4 double"])
    reason = "activations that are rounded to int8 need codes whose values, or these twice, are integers of 8 bits"
    rounded = {"activations": "int8"}
    with pytest.raises(ConfigError, match=f"activations: native kernels cannot round these rows: {reason}"):
        make_plan(quantized, quantization_config=rounded)
    stored = {"quantization_config": {**rounded, "weights": "stored"}}
    with pytest.raises(ConfigError, match=f"kernels='native' cannot multiply by the checkpoint's .* weights: {reason}"):
        make_plan(quantized, kernels="native", **stored)


def test_rows_that_cannot_be_cut_between_records(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 24, "num_key_value_heads": 4, "num_hidden_layers": 1}
    write_checkpoint(tmp_path, {**DENSE, **sizes}, seed=1)
    with pytest.raises(ConfigError, match="down_proj.weight: quantized rows of 24 features cannot be cut into 4 parts"):
        LLM(str(tmp_path), quantization="int8_w8a8", tensor_parallel_size=4)


@pytest.mark.skipif(unavailable() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("settings", [{}, {"quantization_config": {"activations": "int8"}}], ids=["file's", "int8"])
def test_answers_do_not_depend_on_the_batch(settings: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities are equal bit for bit, alone and beside another request, in one chunk and in several."""
    _, quantized = write(tmp_path, DENSE, CASES["gptq 4 bits"])
    with LLM(str(quantized), warm_up=False, enable_prefix_caching=False, **COMMON, **settings) as llm:
        together = generated(llm)
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize("case", ["compressed-tensors int8", "gptq act-order"])
def test_the_plan_counts_the_bytes_of_stored_weights(case: str, tmp_path: Path) -> None:
    _, quantized = write(tmp_path, DENSE, CASES[case])
    for choice in (STORED, DECODED):
        plan = make_plan(quantized, **choice)
        arrays = load_params(plan, plan.models[0])
        assert plan.needs.weights == sum(array.nbytes for array in arrays)


def test_settings_know_every_way_to_quantize() -> None:
    assert NAMES == tuple(METHODS)
    assert set(SHORT_NAMES.values()) < set(NAMES)
