"""Every malformed file of a model ends in one line that names the file, before any weight is read."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, RequestFailedError
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.engine.model_defaults import (
    chosen_parsers,
    default_sampling_params,
    eos_token_ids,
    find_tokenizer,
    read_generation_config,
)
from jaxserve.models.loading import read_model_config
from jaxserve.models.registry import config_from_hf
from jaxserve.text.tokenizer import load_tokenizer
from tests.jaxserve.test_rank_tokenizer import SMALL, tekken
from tests.random_checkpoint import LLAMA

DEEP = "[" * 100_000 + "]" * 100_000
WRONG: list[Any] = [None, True, 5, -1, 1.5, "\ud800", [], ["x"], [[]], {}, {"x": 5}, {"content": 5}]
FILES: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "torch_dtype": "float32",
        "rope_scaling": None,
        "quantization_config": None,
    },
    "generation_config.json": {"temperature": 0.5, "eos_token_id": [1], "top_k": 5, "max_new_tokens": 5},
    "special_tokens_map.json": {"eos_token": {"content": "</s>"}, "additional_special_tokens": ["</s>"]},
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "add_bos_token": False,
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True, "lstrip": False}},
        "chat_template": [{"name": "default", "template": "{{ 1 }}"}],
        "tokenizer_class": "LlamaTokenizer",
        "extra_special_tokens": {"a": "<s>"},
        "legacy": False,
    },
    "added_tokens.json": {"<s>": 1},
    "chat_template.json": {"chat_template": "{{ 1 }}"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's files without its weights."""
    directory = tmp_path_factory.mktemp("malformed") / "model"
    shutil.copytree(MODEL_DIRECTORY, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]  # that of chat_template.json is read only without it
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def start(directory: Path) -> None:
    """All that reads text files when an engine starts."""
    config = EngineConfig(model=str(directory))
    plan = Mock()
    plan.config, plan.directory = read_model_config(directory), directory
    default_sampling_params(config, directory)
    tokenizer = find_tokenizer(config, directory)
    assert tokenizer is not None
    chosen_parsers(config, plan.config.architecture, tokenizer)
    eos_token_ids(config, plan, tokenizer)
    tokenizer.info()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    inner = changed = copy.deepcopy(value)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return changed


def failure(directory: Path, name: str, content: str) -> str | None:
    """The message of a start with other content of a file; None if the engine can use it."""
    path = directory / name
    before = path.read_bytes() if path.exists() else None
    path.write_text(content, "utf-8")
    try:
        start(directory)
    except ConfigError as error:
        return str(error)
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)
    return None


@pytest.mark.parametrize("name", FILES)
def test_any_value_in_any_place_is_used_or_refused_with_its_file(model: Path, name: str) -> None:
    content = json.loads((model / name).read_text()) if (model / name).exists() else {}
    content |= FILES[name]
    num_refused = 0
    for place in places(content):
        for value in WRONG:
            message = failure(model, name, json.dumps(with_value(content, place, value)))
            num_refused += message is not None
            assert message is None or name in message, (place, value, message)
    assert num_refused > len(WRONG)


@pytest.mark.parametrize("name", [*FILES, "tokenizer.json"])
@pytest.mark.parametrize("content", [DEEP, "", "{", f'{{"a": {DEEP}}}', "[" + "9" * 5000 + "]"])
def test_what_is_no_json_is_refused_with_its_file(model: Path, name: str, content: str) -> None:
    message = failure(model, name, content)
    assert message is not None
    assert name in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, r"json: chat_template: expected a template, or a list .*got 5"),
        (
            "tokenizer_config.json",
            {"chat_template": ["x"]},
            r"json: chat_template\[0\]: expected an object with 'name'",
        ),
        ("tokenizer_config.json", {"chat_template": {"a": 5}}, r"json: chat_template.a: expected a string, got 5"),
        ("tokenizer_config.json", {"bos_token": ["x"]}, r"json: bos_token: a special token must be .*got \['x'\]"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "json: bos_token: expected a string of valid Unicode"),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}, "json: added_tokens_decoder: expected an object, got 5"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder: expected token ids"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "json: add_bos_token: expected true or false, got 'yes'"),
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "json: extra_special_tokens: expected a list or"),
        ("added_tokens.json", {"<a>": 1e400}, "added_tokens.json: <a>: expected a token id, got inf"),
        ("config.json", {"model_type": ["llama"]}, "config.json: model_type: expected a string"),
        ("config.json", {"architectures": [["x"]]}, r"config.json: architectures\[0\]: expected a string, got \['x'\]"),
        ("config.json", {"dtype": "float32", "torch_dtype": "float1"}, "torch_dtype: expected one of .*got 'float1'"),
        ("generation_config.json", {"do_sample": True, "temperature": "x"}, "generation_config.json: temperature"),
    ],
)
def test_messages_name_file_key_expected_and_got(model: Path, name: str, changes: dict, message: str) -> None:
    content = json.loads((model / name).read_text()) if (model / name).exists() else {}
    assert re.search(message, failure(model, name, json.dumps({**content, **changes})) or "")


def test_a_template_file_that_is_not_text(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ConfigError, match=r"chat_template.jinja cannot be read as a chat template in UTF-8"):
        start(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["FalconH1ForCausalLM"], "mlp_multipliers": 5}, "mlp_multipliers: expected a list of 2"),
        ({"architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": []}, "model_type: expected a string"),
    ],
)
def test_fields_of_families(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**LLAMA, **fields}, "config.json")


def test_a_deep_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(DEEP)
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read as JSON: maximum recursion"):
        read_generation_config(tmp_path)


def test_any_value_in_a_tekken_file_is_used_or_refused_with_its_file(tmp_path: Path) -> None:
    content = tekken(SMALL)
    ways = [place for place in places(content) if place[:1] != ("vocab",) or len(place) < 2 or place[1] == 0]
    for place in ways:
        for value in WRONG:
            (tmp_path / "tekken.json").write_text(json.dumps(with_value(content, place, value)))
            try:
                load_tokenizer(tmp_path)
            except ConfigError as error:
                assert "tekken.json" in str(error), (place, value)


def test_ranks_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("AA== " + "5" * 5000)
    with pytest.raises(ConfigError, match=r"tiktoken.model: expected the ranks 0 to 0"):
        load_tokenizer(tmp_path)


def backtracking(directory: Path, expression: str) -> Path:
    """The demo model's tokenizer with another expression that splits texts."""
    made = tokenizers.Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    made.save(str(directory / "tokenizer.json"))
    return directory


def test_an_expression_that_backtracks_is_refused_at_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be used as a tokenizer: .*retry-limit"):
        load_tokenizer(backtracking(tmp_path, "(a+)+$"))
    capfd.readouterr()


def test_an_expression_that_backtracks_at_a_text_fails_its_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(backtracking(tmp_path, "(c+)+$"))
    for encode in (tokenizer.encode, tokenizer.starts, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(RequestFailedError, match=r"the tokenizer failed at this text: .*retry-limit"):
            encode("c" * 60 + "b")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    capfd.readouterr()
