"""Settings of an engine: vLLM's names and defaults, and a message for everything that is wrong with them."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import parse_length
from jaxserve.api.errors import ConfigError


@pytest.fixture(autouse=True)
def without_type_checks() -> Iterator[None]:
    """The type checks that tests run with would see wrong types before our own checks do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def make(**arguments: Any) -> EngineConfig:
    return EngineConfig.from_arguments("some-model", **arguments)


def test_defaults_are_those_of_vllm() -> None:
    config = make()
    assert config.model == "some-model"
    assert (config.dtype, config.seed, config.gpu_memory_utilization) == ("auto", 0, 0.92)
    assert (config.tensor_parallel_size, config.data_parallel_size) == (1, 1)
    assert config.trust_remote_code is False
    assert config.max_model_len is config.max_num_seqs is config.block_size is None


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_secret_is_not_printed() -> None:
    assert "hf_abc" not in repr(make(hf_token="hf_abc"))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("blocksize", "block_size"),
    ],
)
def test_an_unknown_argument_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument '{name}'; did you mean '{suggestion}'"):
        make(**{name: 1})


def test_an_argument_like_no_other_has_no_suggestion() -> None:
    with pytest.raises(ConfigError, match="no argument 'xyzzy'$"):
        make(xyzzy=1)


NOT_BUILT = {
    "skip_tokenizer_init": (True, False),
    "cpu_offload_gb": (4, 0),
    "kv_cache_dtype": ("fp8", "auto"),
    "enable_lora": (True, False),
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_takes_its_neutral_value_alone(name: str) -> None:
    wanted, neutral = NOT_BUILT[name]
    with pytest.raises(ConfigError, match=f"^{name}=.*is not supported yet; use {name}="):
        make(**{name: wanted})
    assert make(**{name: neutral}) == make()


def test_a_number_is_not_a_neutral_flag() -> None:
    with pytest.raises(ConfigError, match="enable_lora=0 is not supported"):
        make(enable_lora=0)
    with pytest.raises(ConfigError, match="cpu_offload_gb=False is not supported"):
        make(cpu_offload_gb=False)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("scheduling_policy", "lifo", "expected one of fcfs, priority, got 'lifo'"),
        ("logprobs_mode", "cooked", "expected one of raw_logprobs, processed_logprobs, raw_logits, processed_logits"),
        ("max_logprobs", -2, "expected an integer >= -1, got -2"),
        ("long_prefill_token_threshold", -1, "expected an integer >= 0, got -1"),
        ("runner", "draft", "expected one of auto, generate, pooling, got 'draft'"),
        ("convert", "classify", "expected one of auto, none, embed, got 'classify'"),
        ("tokenizer_mode", "mistral", "expected one of auto, hf, slow, got 'mistral'"),
        ("load_format", "gguf", "expected one of auto, safetensors, pt, dummy, got 'gguf'"),
        ("enable_chunked_prefill", 0, "expected bool, got 0"),
    ],
)
def test_a_setting_says_which_values_it_takes(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: {expected}"):
        make(**{name: value})


@pytest.mark.parametrize(("given", "kept"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_have_their_other_names(given: str, kept: str) -> None:
    assert make(dtype=given).dtype == kept


WRONG = [
    ({"runner": "pooling", "convert": "none"}, "runner='pooling' and convert='none' contradict each other"),
    ({"runner": "generate", "convert": "embed"}, "runner='generate' and convert='embed' contradict each other"),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": "4k"},
        "max_num_batched_tokens=512 is less than max_model_len=4000; use max_num_batched_tokens >= 4000 or "
        "max_model_len <= 512",
    ),
    (
        {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
        "long_prefill_token_threshold=8 splits prompts, but enable_chunked_prefill=False computes each in one step",
    ),
    (
        {"per_request_spec_decode_metrics": "summary"},
        "per_request_spec_decode_metrics='summary' needs speculative_config: without it there are no drafts",
    ),
    (
        {"per_request_spec_decode_metrics": "all", "spec_method": "suffix"},
        "per_request_spec_decode_metrics: expected one of none, summary, detailed, got 'all'",
    ),
    ({"speculative_config": "ngram"}, "speculative_config: expected dict, got 'ngram'"),
    (
        {"speculative_config": {}},
        "speculative_config.method: expected one of grammar, .*, eagle3, dflash, mtp, got None",
    ),
    (
        {"speculative_config": {"method": "eagle9"}},
        "speculative_config.method: expected one of grammar, .*, draft_model, eagle, eagle3, dflash, mtp, got 'eagle9'",
    ),
    ({"speculative_config": {"method": ["ngram"]}}, r"speculative_config.method: .*got \['ngram'\]"),
    (
        {"speculative_config": {"method": "ngram", "model": "m"}},
        "speculative_config: expected method, num_speculative_tokens, enable_adaptive_verification, prompt_lookup_max, "
        "prompt_lookup_min with method 'ngram'; got 'model'",
    ),
    (
        {"speculative_config": {"method": "ngram"}},
        "speculative_config.num_speculative_tokens: expected an integer from 1 to 64, got None",
    ),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": True}},
        "speculative_config.num_speculative_tokens: expected an integer from 1 to 64, got True",
    ),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 0}},
        "speculative_config.prompt_lookup_min: expected an integer >= 1, got 0",
    ),
    ({"spec_method": "ngram", "spec_tokens": 65}, "num_speculative_tokens: expected an integer from 1 to 64, got 65"),
    (
        {"spec_method": "suffix", "speculative_config": {"enable_adaptive_verification": 1}},
        "speculative_config.enable_adaptive_verification: expected true or false, got 1",
    ),
    (
        {"spec_method": "suffix", "speculative_config": {"suffix_max_tree_depth": 8}},
        "got 'suffix_max_tree_depth'; did you mean suffix_decoding_max_tree_depth?",
    ),
    (
        {"spec_method": "suffix", "speculative_config": {"suffix_decoding_min_token_prob": 1.5}},
        "speculative_config.suffix_decoding_min_token_prob: expected a number from 0 to 1, got 1.5",
    ),
    (
        {"spec_method": "suffix", "speculative_config": {"suffix_decoding_max_spec_factor": float("nan")}},
        "suffix_decoding_max_spec_factor: expected a number >= 0, got nan",
    ),
    (
        {"spec_method": "suffix", "speculative_config": {"method": "ngram"}},
        "spec_method='suffix' and speculative_config.method='ngram' differ: give one of them",
    ),
    ({"dtype": "int8"}, "dtype: expected one of auto, float32.*got 'int8'"),
    ({"dtype": None}, "dtype: expected one of .*got None"),
    ({"block_size": 12}, "block_size: expected 8, 16, 32, 64 or 128 tokens, got 12"),
    ({"block_size": True}, "block_size: .*got True"),
    ({"block_size": "16"}, "block_size: .*got '16'"),
    ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization: expected a number in \(0, 1\], got 0"),
    ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization: .*got 1.01"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: .*got nan"),
    ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization: .*got '0.5'"),
    ({"gpu_memory_utilization": True}, "gpu_memory_utilization: .*got True"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected an integer >= 1, got 0"),
    ({"tensor_parallel_size": 2.0}, "tensor_parallel_size: .*got 2.0"),
    ({"data_parallel_size": -1}, "data_parallel_size: expected an integer >= 1, got -1"),
    ({"max_num_seqs": 0}, "max_num_seqs: expected an integer >= 1, got 0"),
    ({"max_num_seqs": True}, "max_num_seqs: .*got True"),
    ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens: .*got 'many'"),
    ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override: expected an integer >= 1, got 0"),
    ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes: .*got 1.5"),
    ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ({"trust_remote_code": "yes"}, "trust_remote_code: expected bool, got 'yes'"),
    ({"disable_log_stats": 1}, "disable_log_stats: expected bool, got 1"),
    ({"async_scheduling": "on"}, "async_scheduling: expected bool, got 'on'"),
    ({"hf_overrides": "x"}, "hf_overrides: expected dict, got 'x'"),
    ({"override_generation_config": "x"}, "override_generation_config: expected dict, got 'x'"),
    (
        {"override_generation_config": {"temperature": "hot"}},
        "override_generation_config.temperature: temperature must",
    ),
    ({"override_generation_config": {"top_p": 7}}, "override_generation_config.top_p: top_p must"),
    (
        {"override_generation_config": {"max_new_tokens": 0}},
        "override_generation_config.max_new_tokens: max_tokens must",
    ),
    ({"override_generation_config": {"do_sample": 1}}, "override_generation_config.do_sample: expected bool, got 1"),
    (
        {"override_generation_config": {"max_tokens": 5}},
        "expected temperature, .*max_new_tokens, do_sample; got 'max_tok",
    ),
    ({"compile_sizes": [2]}, r"compile_sizes: expected dict, got \[2\]"),
    (
        {"compile_sizes": {"prefill": [2]}},
        r"compile_sizes: expected \{\"decode\": \[...\], \"mixed\": \[...\]\}, got key 'prefill'",
    ),
    ({"compile_sizes": {1: [2]}}, "compile_sizes: .*got key 1"),
    ({"compile_sizes": {"decode": 2}}, r"compile_sizes\.decode: expected a list of at least one integer, got 2"),
    ({"compile_sizes": {"decode": "2"}}, r"compile_sizes\.decode: expected a list .*got '2'"),
    ({"compile_sizes": {"mixed": []}}, r"compile_sizes\.mixed: expected a list of at least one .*got \[\]"),
    ({"compile_sizes": {"mixed": None}}, r"compile_sizes\.mixed: expected a list .*got None"),
    ({"compile_sizes": {"mixed": (2,)}}, r"compile_sizes\.mixed: expected a list .*got \(2,\)"),
    ({"compile_sizes": {"mixed": [2, 0]}}, r"compile_sizes\.mixed\[1\]: expected an integer >= 1, got 0"),
    ({"compile_sizes": {"mixed": [2.0]}}, r"compile_sizes\.mixed\[0\]: expected an integer >= 1, got 2.0"),
    ({"compile_sizes": {"decode": [True]}}, r"compile_sizes\.decode\[0\]: .*got True"),
    ({"compile_sizes": {"decode": ["2"]}}, r"compile_sizes\.decode\[0\]: .*got '2'"),
    ({"tokenizer": 7}, "tokenizer: expected str, got 7"),
    ({"revision": 7}, "revision: expected str, got 7"),
    ({"mesh": 7}, "mesh: expected str, got 7"),
    (
        {"mesh": ""},
        "mesh: expected a size >= 1 for any of data, stage, tensor, expert, such as 'data=2,tensor=2', got ''",
    ),
    ({"mesh": "stage=2", "pipeline_parallel_size": 4}, "means pipeline_parallel_size=2, but pipeline_parallel_size=4"),
    ({"pipeline_parallel_size": True}, "pipeline_parallel_size: expected an integer >= 1, got True"),
    ({"stage_layers": 3}, "stage_layers: expected list, got 3"),
    ({"stage_layers": [4, 0]}, r"stage_layers\[1\]: expected an integer >= 1, got 0"),
    ({"stage_layers": []}, "stage_layers: expected the number of layers of each stage, got an empty list"),
    ({"mesh": "data"}, "mesh: expected a size .*got 'data'"),
    ({"mesh": "data=0"}, "mesh: expected a size .*got 'data=0'"),
    ({"mesh": "data=two"}, "mesh: expected a size .*got 'data=two'"),
    ({"mesh": "rows=2"}, "mesh: expected a size .*got 'rows=2'"),
    ({"mesh": "data=2,data=2"}, "mesh: expected a size .*got 'data=2,data=2'"),
    (
        {"mesh": "data=2", "tensor_parallel_size": 2},
        "mesh='data=2' means tensor_parallel_size=1, but tensor_parallel_size=2 is given too; use one",
    ),
    (
        {"mesh": "tensor=2", "tensor_parallel_size": 1},
        "mesh='tensor=2' means tensor_parallel_size=2, but tensor_parallel_size=1 is given too",
    ),
    ({"mesh": "expert=4", "expert_parallel_size": 2}, "means expert_parallel_size=4, but expert_parallel_size=2"),
    ({"max_model_len": 0}, "max_model_len: expected a number of tokens >= 1, such as 4096, '4k' or -1 for auto, got 0"),
    ({"max_model_len": "long"}, "max_model_len: .*got 'long'"),
    ({"max_model_len": 4096.0}, "max_model_len: .*got 4096.0"),
    ({"max_model_len": True}, "max_model_len: .*got True"),
]


def test_a_mesh_names_its_axes_in_any_order() -> None:
    """It stands for the sizes; an axis that is not named has one device."""
    config = make(mesh=" tensor=2, data=3 ")
    assert (config.data_parallel_size, config.tensor_parallel_size, config.expert_parallel_size) == (3, 2, 1)
    assert make(mesh="expert=2", expert_parallel_size=2).expert_parallel_size == 2, "the same size twice"
    assert dataclasses.replace(config, seed=1).tensor_parallel_size == 2


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_values_say_what_was_expected_and_what_came(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": None}, "seed: .*got None"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size: .*got None"),
        ({"trust_remote_code": None}, "trust_remote_code: .*got None"),
        ({"block_size": 16.0}, "block_size: .*got 16.0"),
        ({"dtype": ["float32"]}, "dtype: .*got"),
        ({"max_model_len": "9" * 400}, "max_model_len: "),
    ],
)
def test_more_wrong_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("model", "message"), [("", "model: .*got an empty string"), (7, "model: expected str, got 7")]
)
def test_a_model_is_named_by_text(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_arguments(model)


@pytest.mark.parametrize(
    ("given", "length"),
    [
        (1, 1),
        (4096, 4096),
        (-1, -1),
        ("auto", -1),
        ("512", 512),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25600),
        ("0.5K", 512),
        ("1M", 1 << 20),
        (" 2m ", 2_000_000),
    ],
)
def test_lengths_in_all_forms(given: Any, length: int) -> None:
    assert parse_length("max_model_len", given) == length


@pytest.mark.parametrize("given", ["", "k", "-4k", "0", "0.0001k", "1.5", "4 k", "4g", "1e3", "-1", None, [4]])
def test_texts_that_are_no_length(given: Any) -> None:
    with pytest.raises(ConfigError, match="^length: expected a number of tokens"):
        parse_length("length", given)


def test_every_setting_is_used_somewhere(repository: Path) -> None:
    """A setting that is accepted and ignored is a bug."""
    read = set()
    for path in (repository / "jaxserve").rglob("*.py"):
        if path.name != "config.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "config":
                    read.add(node.attr)
    unused = {field.name for field in dataclasses.fields(EngineConfig)} - read
    assert unused == {"convert", "mesh", "spec_method", "spec_model", "spec_tokens"}, "they stand for other settings"
