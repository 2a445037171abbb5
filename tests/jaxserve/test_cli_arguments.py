"""Flags made from fields: what each kind of field takes, and what becomes of it."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from jaxserve import cli, cli_arguments
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.cli import main
from jaxserve.cli_arguments import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_arguments,
    field_docs,
    sampling_arguments,
)


def parser() -> argparse.ArgumentParser:
    """The flags of `jaxserve generate` that stand for fields."""
    made = FlagParser(allow_abbrev=False, exit_on_error=False)
    add_engine_arguments(made)
    add_sampling_arguments(made)
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--temperature 0.5 --top-k 3", {"temperature": 0.5, "top_k": 3}),
        ("--presence-penalty -1 --repetition-penalty 1.5", {"presence_penalty": -1.0, "repetition_penalty": 1.5}),
        ("--stop a --stop b", {"stop": ("a", "b")}),
        ("--bad-words x --bad-words y", {"bad_words": ("x", "y")}),
        ("--stop-token-ids 1 2", {"stop_token_ids": (1, 2)}),
        ("--allowed-token-ids 4 5", {"allowed_token_ids": (4, 5)}),
        ("--logprob-token-ids 9", {"logprob_token_ids": (9,)}),
        ('--logit-bias {"5":-1.5}', {"logit_bias": {5: -1.5}}),
        ('--extra-args {"a":[1]}', {"extra_args": {"a": [1]}}),
        ('--structured-outputs {"regex":"a+"}', {"structured_outputs": {"regex": "a+"}}),
        (
            '--repetition-detection {"max_pattern_size":4,"min_count":3}',
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
        ),
        (
            "--no-detokenize --flat-logprobs --skip-reading-prefix-cache",
            {"detokenize": False, "flat_logprobs": True, "skip_reading_prefix_cache": True},
        ),
        ("--thinking-token-budget 7 --logprobs -1", {"thinking_token_budget": 7, "logprobs": -1}),
    ],
)
def test_sampling_flags(words: str, expected: dict[str, Any]) -> None:
    assert sampling_arguments(parser().parse_args(words.split())) == SamplingParams(**expected)


def test_nothing_given_is_none() -> None:
    options = parser().parse_args([])
    assert sampling_arguments(options) is None
    assert engine_arguments(options) == {"model": "demo"}


def test_the_seed_is_the_engines() -> None:
    options = parser().parse_args(["--seed", "3"])
    assert engine_arguments(options)["seed"] == 3
    assert sampling_arguments(options) is None


def test_engine_flags() -> None:
    words = ["--max-model-len", "4k", "--hf-overrides", '{"a": 1}', "--no-async-scheduling", "--block-size", "8"]
    expected = {"max_model_len": "4k", "hf_overrides": {"a": 1}, "async_scheduling": False, "block_size": 8}
    assert engine_arguments(parser().parse_args(words)) == {"model": "demo", **expected}


@pytest.mark.parametrize(
    "words",
    [
        ["--compile-sizes", '{"decode": [2, 64], "mixed": [1024]}'],
        ["--compile-sizes.decode", "[2,64]", "--compile-sizes.mixed=[1024]"],
    ],
)
def test_compile_sizes(words: list[str]) -> None:
    found = engine_arguments(parser().parse_args(words))
    assert found == {"model": "demo", "compile_sizes": {"decode": [2, 64], "mixed": [1024]}}
    assert EngineConfig.from_arguments(**found).compile_sizes == found["compile_sizes"]


def test_every_field_has_a_flag() -> None:
    help_ = parser().format_help()
    names = [field.name for cls in (SamplingParams, EngineConfig) for field in dataclasses.fields(cls)]
    without = [name for name in names if f"--{name.replace('_', '-')}" not in help_]
    assert without == ["output_kind"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--logit-bias", "x"], "expected a JSON object, got 'x'"),
        (["--structured-outputs", "[1]"], r"expected a JSON object, got '\[1\]'"),
        (["--top-k", "many"], "invalid int value: 'many'"),
        (["--allowed-token-ids", "a"], "invalid int value: 'a'"),
    ],
)
def test_bad_flags(words: list[str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parser().parse_args(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hf-overrides.a 1", {"a": 1}),
        ("--hf-overrides.a=1 --hf-overrides.b=x=y", {"a": 1, "b": "x=y"}),
        ("--hf-overrides.a -1", {"a": -1}),
        ("--hf-overrides.a --b", {"a": "--b"}),
        ("--hf-overrides.a.b.c true --hf-overrides.a.d null", {"a": {"b": {"c": True}, "d": None}}),
        ("--hf-overrides.a_b-c True", {"a_b-c": "True"}),
        ('--hf-overrides.a {"b":1} --hf-overrides.a {"c":2}', {"a": {"b": 1, "c": 2}}),
        ("--hf-overrides.a [1,2] --hf-overrides.a [3]", {"a": [3]}),
        ("--hf-overrides.a+ x --hf-overrides.a+=y,z", {"a": ["x", "y", "z"]}),
        ('--hf-overrides {"a":["w"]} --hf-overrides.a+ x', {"a": ["w", "x"]}),
        ('--hf-overrides {"a":1,"b":{"c":2}} --hf-overrides.b.d 3', {"a": 1, "b": {"c": 2, "d": 3}}),
        ('--hf-overrides.b.d 3 --hf-overrides {"a":1,"b":{"c":2}}', {"a": 1, "b": {"c": 2, "d": 3}}),
        ('--hf-overrides.a 1 --hf-overrides={"a":2}', {"a": 2}),
        ('--hf-overrides {"a":1} --hf-overrides {"b":2} --hf-overrides.c 3', {"b": 2, "c": 3}),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", {"a": {"b": 2}}),
    ],
)
def test_objects_part_by_part(words: str, expected: dict[str, Any]) -> None:
    found = engine_arguments(parser().parse_args([*words.split(), "--block-size", "8", "--seed", "1"]))
    assert found == {"model": "demo", "hf_overrides": expected, "block_size": 8, "seed": 1}


def test_parts_of_sampling_flags() -> None:
    words = "--logit-bias.5 -1.5 --structured-outputs.regex a+ --repetition-detection.max_pattern_size 4 --stop a.b"
    options = parser().parse_args([*words.split(), "--repetition-detection.min_count", "3"])
    expected: dict[str, Any] = {"logit_bias": {5: -1.5}, "structured_outputs": {"regex": "a+"}, "stop": ("a.b",)}
    expected["repetition_detection"] = {"max_pattern_size": 4, "min_count": 3}
    assert sampling_arguments(options) == SamplingParams(**expected)


@pytest.mark.parametrize(
    "words", ["--hf-overrides.a", "--hf-overrides. 1", "--hf-overrides.a..b 1", "--hf-overrides.+ 1"]
)
def test_parts_without_a_name_or_a_value(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert "expected --hf-overrides.NAME VALUE or --hf-overrides JSON" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--seed.a 1", "--nothing.a 1", "--hf-overrides+ a", "--hf.overrides.a 1"])
def test_other_flags_have_no_parts(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert f"unknown argument {words.split()[0]}" in capsys.readouterr().err


def test_what_stands_behind_two_dashes_is_no_flag() -> None:
    made = FlagParser()
    add_engine_arguments(made)
    made.add_argument("words", nargs="*")
    assert made.parse_args(["--", "--hf-overrides.a", "1"]).words == ["--hf-overrides.a", "1"]


@pytest.mark.parametrize("command", [["generate"], ["serve"], ["bench", "throughput"], ["eval", "demo"]])
def test_commands_take_parts(command: list[str]) -> None:
    options = cli._parser(command[:1]).parse_args([*command, "--override-generation-config.top_k", "5"])
    assert engine_arguments(options)["override_generation_config"] == {"top_k": 5}


@dataclasses.dataclass
class Part:
    """Fields of every kind that a flag can be made for."""

    mode: Literal["fast", "small"] | None = None
    """One of two."""
    level: Literal[1, 2] = 1
    """A number of
    two."""
    names: list[str] | None = None
    """Some texts."""
    things: list[Any] | None = None
    """Anything."""
    ids: tuple[int, ...] = ()
    """Some numbers, 100 % whole."""
    table: Mapping[str, float] | None = None
    """A table."""
    inner: "Part | None" = None
    """Another."""
    either: str | Sequence[str] = ""
    """A text or some."""
    share: float | None = None
    """A number."""


def test_kinds_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_arguments, "SamplingParams", Part)
    made = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_arguments(made)
    words = "--mode fast --level 2 --names a --names b --things c --ids 1 2 --either d --share 2".split()
    options = vars(made.parse_args([*words, "--table", '{"a": 1}', "--inner", "{}"]))
    assert options == {
        "mode": "fast",
        "level": 2,
        "names": ["a", "b"],
        "things": ["c"],
        "ids": [1, 2],
        "table": {"a": 1},
        "inner": {},
        "either": ["d"],
        "share": 2.0,
    }
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'slow'"):
        made.parse_args(["--mode", "slow"])
    assert "100 % whole" in made.format_help()


def test_docs_are_one_line_each() -> None:
    assert field_docs(Part)["level"] == "A number of two."
    assert field_docs(EngineConfig)["model"].startswith("Directory, ``.gguf`` file, hub id")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --prot 8100", "jaxserve serve: error: unknown argument --prot; did you mean --port?"),
        (
            "generate --max-token=3",
            "jaxserve generate: error: unknown argument --max-token=3; did you mean --max-tokens?",
        ),
        ("eval demo --zzz", "jaxserve eval: error: unknown argument --zzz\n"),
    ],
)
def test_an_unknown_flag_names_the_nearest(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
