"""What an engine process makes of settings: default sampling parameters, formats of contents, the tokenizer's data."""

import asyncio
import json
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import ConfigError, RequestError
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_process.process import max_output_tokens
from jaxserve.server.frontend import sampling_params
from jaxserve.server.settings import ServerConfig
from jaxserve.text.tokenizer import load_tokenizer
from tests.server_process import PROGRAMS_CACHE

PATIENCE_S = 120.0
TEMPLATE = "{{ messages[0].content | length }}{% for m in messages %}{{ m.content | string }}{% endfor %}"
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 8 << 20,
    "compilation_cache_dir": str(PROGRAMS_CACHE),
    "chat_template": TEMPLATE,
    "override_generation_config": {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 16},
}
CHAT = {"messages": [{"role": "user", "content": "12"}]}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all tests."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, whose tokenizer's file names others on this disk."""
    directory = Path(shutil.copytree(MODEL_DIRECTORY, tmp_path_factory.mktemp("models") / "demo"))
    path = directory / "tokenizer_config.json"
    more = {
        "name_or_path": "/home/someone/model",
        "special_tokens_map_file": "/home/someone/.cache/special_tokens_map.json",
        "init_inputs": [str(directory / "tokenizer.json"), 7],
        "source": f"file://{directory}",
        "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": False},
        "added_tokens_decoder": {"0": {"content": "<pad>", "special": True}},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return directory


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, Any]) -> Any:
    return runner.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.fixture(scope="module")
def client(runner: asyncio.Runner, model: Path) -> Iterator[EngineClient]:
    """An engine whose templates see parts."""
    config = ServerConfig(chat_template_content_format="openai")
    made = EngineClient({"model": str(model), **SETTINGS}, config)
    run(runner, made.start())
    yield made
    run(runner, made.stop(0.0))


def test_what_overrides_the_generation_config_is_the_servers_default(client: EngineClient) -> None:
    """Also where it is Python's default, as 16 tokens are."""
    assert client.info.default_fields == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 16}
    assert sampling_params(client.info, {}, is_chat=True).max_tokens == 16
    assert sampling_params(client.info, {"temperature": 0.25}).temperature == 0.25


def test_max_new_tokens_of_the_operator_is_a_limit(client: EngineClient) -> None:
    """As in vLLM; less can be asked for, and what cannot be kept within it is refused."""
    assert client.info.max_output_tokens == 16
    assert [sampling_params(client.info, {"max_tokens": asked}).max_tokens for asked in (3, 16, 17, -1)] == [
        3,
        16,
        16,
        16,
    ]
    with pytest.raises(RequestError, match="min_tokens"):
        sampling_params(client.info, {"max_tokens": 40, "min_tokens": 20})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"generation_config": "vllm"}, None),
        ({"override_generation_config": {"temperature": 0.5}}, None),
        ({"override_generation_config": {"max_new_tokens": 9}}, 9),
        ({"generation_config": "/a/directory"}, 7),
    ],
)
def test_max_new_tokens_of_the_model_is_a_default(arguments: dict[str, Any], expected: int | None) -> None:
    assert max_output_tokens(arguments, {"max_tokens": 7}) == expected


def test_the_format_of_contents_reaches_templates(runner: asyncio.Runner, client: EngineClient) -> None:
    text, _ = run(runner, client.render_chat(CHAT))
    assert text == "1[{'type': 'text', 'text': '12'}]"


def test_the_tokenizer_is_described_without_paths(runner: asyncio.Runner, client: EngineClient, model: Path) -> None:
    info = run(runner, client.tokenizer_info())
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "init_inputs": [7],
        "added_tokens_decoder": {"0": "<pad>"},
    }
    assert str(model) not in json.dumps(info)


def test_a_bad_value_is_an_error_at_start(runner: asyncio.Runner) -> None:
    bad = EngineClient({**SETTINGS, "override_generation_config": {"top_p": 7}}, ServerConfig())
    with pytest.raises(ConfigError, match="override_generation_config.top_p: top_p must"):
        run(runner, bad.start())


def test_tokenizers_with_few_files_are_described_too(real_directory: Any) -> None:
    info = load_tokenizer(real_directory("stories260k-model-only")).info()
    assert info == {"tokenizer_class": "LlamaTokenizer"}
    info = load_tokenizer(real_directory("qwen")).info()
    assert (info["tokenizer_class"], info["eos_token"]) == ("Qwen2Tokenizer", "<|im_end|>")
    assert info["chat_template"].startswith("{%- if tools %}")
    assert info["added_tokens_decoder"]["151643"] == "<|endoftext|>"
    info = load_tokenizer(real_directory("gpt2")).info("{{ x }}")
    assert (info["tokenizer_class"], info["chat_template"]) == ("PreTrainedTokenizerFast", "{{ x }}")
    assert info["eos_token"] == "<|endoftext|>"
