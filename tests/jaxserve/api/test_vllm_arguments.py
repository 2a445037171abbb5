"""vLLM's arguments: each is a setting, has no effect and says so in the log, or is refused by name."""

import argparse
import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig, known_settings
from jaxserve.api.errors import ConfigError
from jaxserve.api.vllm_arguments import (
    OTHER_NAMES,
    RENAMED,
    SAME,
    SAME_GROUP,
    SAME_SERVE,
    SERVE_NO_EFFECT,
    SERVE_REFUSED,
    SERVER_ONLY,
)
from jaxserve.api.vllm_engine_arguments import NO_EFFECT, REFUSED
from jaxserve.cli_arguments import FlagParser, add_engine_arguments, engine_arguments
from jaxserve.group.settings import GroupConfig
from jaxserve.server import command
from jaxserve.server.settings import ServerConfig

PLAIN = EngineConfig(model="m")
IGNORED: dict[str, Any] = {
    "enforce_eager": True,
    "swap_space": 4,
    "disable_custom_all_reduce": True,
    "compilation_config": {"level": 3},
    "max_seq_len_to_capture": 8192,
    "limit_mm_per_prompt": {"image": 2},
    "disable_cascade_attn": True,
    "model_impl": "transformers",
    "config_format": "hf",
    "distributed_executor_backend": "mp",
    "cudagraph_capture_sizes": [1, 2],
    "use_tqdm_on_load": False,
    "scheduler_reserve_full_isl": False,
    "prefix_caching_hash_algo": "xxhash",
    "max_loras": 4,
    "served_model_name": "name",
}


def make(**arguments: Any) -> EngineConfig:
    return EngineConfig.from_arguments("m", **arguments)


def test_what_cannot_change_an_answer_is_accepted_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert make(**IGNORED) == PLAIN
    (line,) = caplog.messages
    assert line.startswith("no effect here: ")
    assert all(f"{name}={value!r}" in line for name, value in IGNORED.items())


@pytest.mark.parametrize("name", IGNORED)
def test_each_is_accepted_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert make(**{name: IGNORED[name]}) == PLAIN
    (line,) = caplog.messages
    assert re.fullmatch(rf"no effect here: {name}=.* \(.+\)", line)


@pytest.mark.parametrize("name", [*NO_EFFECT, *REFUSED, *SERVER_ONLY])
def test_a_default_says_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scripts pass all of vLLM's defaults; null and what is empty mean them too."""
    argument = {**NO_EFFECT, **REFUSED, **SERVER_ONLY}[name]
    default = list(argument.default) if isinstance(argument.default, tuple) else argument.default
    for value in (default, None):
        assert make(**{name: value}) == PLAIN
    assert caplog.messages == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_change_an_answer_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='something' is not supported yet; use {name}=.*: .+"):
        make(**{name: "something"})
    for value in REFUSED[name].accepted or ():
        assert make(**{name: value}) == PLAIN


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("distributed_executor_backend", "ray", "use one of None, 'uni', 'mp': "),
        ("data_parallel_backend", "ray", "use one of 'mp'"),
        ("model_impl", "terratorch", "use one of 'auto', 'vllm', 'transformers': each model has one implementation"),
        ("config_format", "mistral", "use one of 'auto', 'hf'"),
        ("prefix_caching_hash_algo", "md5", "use one of 'sha256', "),
    ],
)
def test_other_values_of_those_without_effect_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{value}' is not supported yet; {message}"):
        make(**{name: value})


def test_a_misspelt_one_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="LLM has no argument 'enforce_eagre'; did you mean 'enforce_eager'"):
        make(enforce_eagre=True)


def test_other_uses_of_the_settings_have_those_alone() -> None:
    assert known_settings({"seed": 1, "swap_space": 4}) == {"seed": 1}


# ---------------------------------------------------------------------------------------------- command lines


def parsed(*arguments: str) -> dict[str, Any]:
    parser = FlagParser(allow_abbrev=False)
    add_engine_arguments(parser)
    found = engine_arguments(parser.parse_args(arguments))
    del found["model"]
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--enforce-eager", {"enforce_eager": True}),
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--swap-space 4", {"swap_space": 4}),
        ("--compilation-config.level 3", {"compilation_config": {"level": 3}}),
        ('-cc {"level":3}', {"compilation_config": {"level": 3}}),
        ("--limit-mm-per-prompt image=2", {"limit_mm_per_prompt": "image=2"}),
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("--distributed-executor-backend mp", {"distributed_executor_backend": "mp"}),
        ("--quantization None", {"quantization": "None"}),
        ("-q fp8", {"quantization": "fp8"}),
        ("-O3", {"optimization_level": 3}),
        ('-sc {"method":"ngram"}', {"speculative_config": {"method": "ngram"}}),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("-tp 2 -pp 2 -dp 1 -ep", {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 1,
            "enable_expert_parallel": True,
        }),
        ("--kv-cache-memory 4096", {"kv_cache_memory_bytes": 4096}),
        ("--runner pooling --load-format dummy", {"runner": "pooling", "load_format": "dummy"}),
        ("--no-enable-chunked-prefill", {"enable_chunked_prefill": False}),
    ],
)  # fmt: skip
def test_flags(line: str, expected: dict[str, Any]) -> None:
    assert parsed(*line.split()) == expected


def serve_arguments(*arguments: str) -> tuple[dict[str, Any], ServerConfig]:
    parser = FlagParser(allow_abbrev=False)
    command.add_arguments(parser)
    return command.serve_arguments(parser.parse_args(arguments))[:2]


def test_flags_of_serve(caplog: pytest.LogCaptureFixture) -> None:
    given, config = serve_arguments("m", "--enforce-eager", "-asc", "4", "--disable-log-requests", "--grpc")
    assert given == {"model": "m", "enforce_eager": True}
    assert config == ServerConfig()
    (line,) = caplog.messages
    assert "api_server_count=4" in line and "disable_log_requests=True" in line and "grpc=True" in line
    _, config = serve_arguments("m", "--disable-uvicorn-access-log", "--served-model-name", "a")
    assert config == ServerConfig(disable_access_log=True, served_model_name=["a"])
    for flag, message in {"--tokens-only": "tokens_only=True", "--middleware=x.y": r"middleware=\['x.y'\]"}.items():
        with pytest.raises(ConfigError, match=f"^{message} is not supported yet; use "):
            serve_arguments("m", flag)


def test_flags_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("enforce-eager: true\nswap_space: 4\ncompilation-config: {level: 3}\napi-server-count: 2\n")
    given, _ = serve_arguments(*command.with_config_file(["m", "--config", str(path)]))
    assert given == {"model": "m", "enforce_eager": True, "swap_space": 4, "compilation_config": {"level": 3}}
    assert "api_server_count=2" in caplog.text


def test_the_help_leaves_them_out() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert "swap-space" not in parser.format_help() and "--runner" in parser.format_help()


# ---------------------------------------------------------------------------------------------- the tables


def test_the_tables_agree_with_the_settings() -> None:
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    server = {field.name for field in dataclasses.fields(ServerConfig)}
    group = {field.name for field in dataclasses.fields(GroupConfig)}
    assert (
        set(SAME) <= engine
        and set(SAME_SERVE) <= server
        and set(SAME_GROUP) <= group
        and set(RENAMED.values()) <= server
    )
    assert not engine & {*NO_EFFECT, *REFUSED, *SERVER_ONLY} and not server & {*SERVE_NO_EFFECT, *SERVE_REFUSED}
    assert set(SERVER_ONLY) <= server, "settings of the server have no effect on an engine alone"
    tables = [NO_EFFECT, REFUSED, SERVE_NO_EFFECT, SERVE_REFUSED, SERVER_ONLY]
    assert len({name for table in tables for name in table}) == sum(map(len, tables)), "each is in one table"
    assert set(OTHER_NAMES) <= {*SAME, *RENAMED.values(), *NO_EFFECT, *REFUSED, *SERVE_NO_EFFECT}


# Names in the list that are no arguments of an engine or a server: groups, benchmarks, and other engines'.
NO_ARGUMENTS = {"offload", "ssl", "config", "mesh"}


def listed(conventions: str) -> tuple[set[str], set[str]]:
    """vLLM's arguments of `LLM`, and its flags, in the conventions."""
    features = conventions.partition("## 1. ")[2].partition("**SGLang differences")[0]
    llm = conventions.partition("### 2.1 ")[2].partition("### 2.2 ")[0]
    named = llm.partition("Named arguments and defaults: ")[2].partition("plus `**kwargs`")[0].replace("*", "")
    words = {word for part in named.split(",") for word in re.split(r"[ /]", part.strip())[:1]}
    words |= {word for word in re.findall(r"spec_\w+", named)}
    words |= set(re.findall(r"`(\w+)`", llm.partition("any EngineArgs field (")[2].partition(")")[0]))
    serve = conventions.partition("### 2.7 ")[2].partition("### 2.8 ")[0]
    offload = conventions.partition("### 2.18 ")[2].partition("SGLang")[0]
    flags = set(re.findall(r"--([a-z0-9]+(?:-[a-z0-9]+)*)", features + serve + offload))
    names = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    return {word for word in words if word}, names - NO_ARGUMENTS


def test_every_argument_in_the_conventions_is_in_the_tables(repository: Path) -> None:
    path = repository.parent / "shared" / "design" / "vllm-conventions.md"
    if not path.exists():
        pytest.skip(f"{path}, the list of vLLM's arguments, is not part of the repository")
    llm, flags = listed(path.read_text(encoding="utf-8"))
    assert {"runner", "enforce_eager", "spec_model", "max_model_len", "load_format"} <= llm and len(llm) > 35
    assert {"enable_lora", "headless", "served_model_name", "kv_offloading_size", "api_server_count"} <= flags
    engine = {*SAME, *NO_EFFECT, *REFUSED}
    assert llm - engine == set()
    aliases = {flag.lstrip("-").replace("-", "_") for flags in OTHER_NAMES.values() for flag in flags}
    assert flags - engine - {*SAME_SERVE, *SAME_GROUP, *RENAMED, *SERVE_NO_EFFECT, *SERVE_REFUSED, *aliases} == set()


def test_the_log_shows_the_line_at_its_default_level() -> None:
    assert logging.getLogger("jaxserve.api.vllm_arguments").isEnabledFor(logging.WARNING)
