"""Files of text are read by their formats: byte order marks, ends of lines, encodings."""

import argparse
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.convert import _with_dtype
from jaxserve import cli
from jaxserve.api.errors import ConfigError
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.text_files import decode_text, split_lines
from jaxserve.bench.serve.datasets import _conversations, custom_requests, read_any_trace
from jaxserve.bench.traces import read_trace
from jaxserve.lab.devices import read_device
from jaxserve.lab.hardware import DEVICES
from jaxserve.models.hf_config import read_config_json
from jaxserve.server import command
from jaxserve.server.auth import _read_auth_file
from jaxserve.text.chat import load_chat_template
from jaxserve.text.tokenizer_files import read_settings

MARK = b"\xef\xbb\xbf"
IN_PROMPTS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"
"""Characters that end a line for ``str.splitlines``, but not in a file of lines."""


def prompts(*flags: str) -> list[Any]:
    """The prompts of a command line."""
    return cli._prompts(cli._parser(["generate"]).parse_args(["generate", *flags]))


def written(path: Path, raw: bytes) -> Path:
    """A file with these bytes."""
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\r\nb\n\nc", ["a", "b", "", "c"]),
        ("a\r", ["a\r"]),
        ("a\r\r\nb", ["a\r", "b"]),
        (f"{IN_PROMPTS}\n", [IN_PROMPTS]),
    ],
)
def test_lines(text: str, lines: list[str]) -> None:
    assert split_lines(text) == lines


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"a\nb\xff", "the file: expected UTF-8, got the byte 0xff in line 2; save it as UTF-8"),
        ("\ufeffHi".encode("utf-16-le"), "expected UTF-8, got UTF-16"),
        ("Hi".encode("utf-16"), "expected UTF-8, got UTF-16"),
    ],
)
def test_text_that_is_no_utf_8(raw: bytes, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        decode_text(raw, "the file")


def test_prompts_of_a_file(tmp_path: Path) -> None:
    raw = MARK + f"first\r\n\n \t\n{IN_PROMPTS}\n\u2028\nlast".encode()
    assert prompts("--prompts", str(written(tmp_path / "p", raw))) == ["first", IN_PROMPTS, "\u2028", "last"]


def test_prompts_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the locale says, they are UTF-8."""
    raw = MARK + f"höher\r\n{IN_PROMPTS}\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="latin-1"))
    assert prompts("--prompts", "-") == ["höher", IN_PROMPTS]


def test_token_ids_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "ids.json", MARK + b"[[1, 2], [3]]")
    assert prompts("--prompt-token-ids", str(path)) == [[1, 2], [3]]


@pytest.mark.parametrize("raw", [b'{"a": 1}', b'"abc"', b"[1, 2]", b'[["a"]]', b"[[true]]"])
def test_token_ids_of_another_form(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a list of lists of token ids in .*ids.json"):
        prompts("--prompt-token-ids", str(written(tmp_path / "ids.json", raw)))


@pytest.mark.parametrize(
    ("flag", "raw", "match"),
    [
        ("--prompts", None, "--prompts: .*wrong cannot be read: No such file"),
        ("--prompts", b"\xff", "--prompts .*wrong: expected UTF-8"),
        ("--prompt-token-ids", None, "--prompt-token-ids: .*wrong cannot be read: No such file"),
        ("--prompt-token-ids", b"[", "--prompt-token-ids: .*wrong is not JSON"),
        ("--prompt-token-ids", b"\xff", "--prompt-token-ids: .*wrong is not JSON"),
    ],
)
def test_files_that_cannot_be_read(
    flag: str, raw: bytes | None, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["generate", flag, str(path)])
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(match, line)


def test_prompts_of_a_load_test(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in (IN_PROMPTS, "second")]
    path = written(tmp_path / "p.jsonl", MARK + "\r\n\n".join(lines).encode())
    options = argparse.Namespace(dataset_path=path, custom_output_len=8)
    assert [one.prompt for one in custom_requests(options)] == [IN_PROMPTS, "second"]


def bos(path: Path) -> Any:
    """A special token of a model directory."""
    return read_settings(path.parent).special_tokens["bos_token"]


def trace(path: Path) -> Any:
    """The first length of a trace in the form of Azure or Mooncake."""
    return read_trace(path).requests[0].num_prompt_tokens


def burst(path: Path) -> Any:
    """A trace in BurstGPT's form."""
    return read_any_trace(path, 1).requests[0].num_prompt_tokens


MARKED: list[tuple[str, str, Callable[[Path], Any], Any]] = [
    ("c.json", '{"a": 1}', read_config_json, {"a": 1}),
    (
        "c.json",
        '{"a": 1}',
        lambda path: json.loads(_with_dtype(path, path.read_bytes(), "float32", None)),
        {"a": 1, "dtype": "float32"},
    ),
    ("tokenizer_config.json", '{"bos_token": "s"}', bos, "s"),
    ("chat_template.jinja", "{{ x }}", lambda path: read_settings(path.parent).chat_templates["default"], "{{ x }}"),
    ("t.jinja", "{{ x }}", load_chat_template, "{{ x }}"),
    ("keys", "- {name: a, key: b}", lambda path: _read_auth_file(path, True)[0][1].name, "a"),
    ("s", "port: 6", lambda path: command.with_config_file(["--config", str(path)])[0], "--port=6"),
    ("d.json", json.dumps(DEVICES["h100"].as_dict()), lambda path: read_device(path).name, DEVICES["h100"].name),
    ("q.json", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]', _conversations, [("a", "b")]),
    ("m.jsonl", '{"timestamp": 1, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}', trace, 700),
    ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.68,7,4", trace, 7),
    ("b.csv", "Timestamp,Request tokens,Response tokens\r\n5,7,4", burst, 7),
]


@pytest.mark.parametrize(("name", "text", "read", "value"), MARKED)
def test_a_byte_order_mark_is_no_part_of_a_file(
    name: str, text: str, read: Callable[[Path], Any], value: Any, tmp_path: Path
) -> None:
    for mark in (b"", MARK):
        assert read(written(tmp_path / name, mark + text.encode())) == value


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_lines_stay_lines_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{IN_PROMPTS}é漢"
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    completion = CompletionOutput(index=0, text=text, token_ids=[1], cumulative_logprob=None)
    output = RequestOutput(
        request_id="1", prompt=text, prompt_token_ids=[1], outputs=[completion], finished=True, num_cached_tokens=0
    )
    (line,) = cli._as_json(output).splitlines()
    line.encode(encoding)
    assert json.loads(line)["outputs"][0]["text"] == text
