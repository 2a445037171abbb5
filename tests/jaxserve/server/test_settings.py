"""The server's settings: what is refused, and how flags, a file and the environment come together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxserve import ConfigError, cli
from jaxserve.server import command, engine_client
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.main import serve
from jaxserve.server.settings import ServerConfig, is_loopback


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port: expected a port from 0 to 65535"),
        ({"grpc_port": "8001"}, "grpc_port: expected int"),
        ({"port": 65535}, r"grpc_port: its default, port \+ 1, exceeds 65535; set grpc_port or a lower port"),
        ({"port": 65534}, r"admin_port: its default, port \+ 2, exceeds 65535"),
        ({"port": True}, "port: expected int, got True"),
        ({"stall_timeout": -1.0}, "stall_timeout: expected seconds from 0"),
        ({"request_timeout": float("nan")}, "request_timeout: expected seconds from 0"),
        ({"chat_template_timeout": 0}, "chat_template_timeout: expected seconds from 0.001 to 1000000, got 0"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs: expected a number from 1 to 2147483647, got 0"),
        ({"max_request_bytes": 3}, "max_request_bytes: expected a number from 1024"),
        ({"max_request_bytes": 2**31}, "max_request_bytes: expected a number from 1024 to 2147483647, got 2147483648"),
        ({"max_concurrent_streams": 2**31}, "max_concurrent_streams: expected a number from 1 to"),
        ({"grpc_keepalive_time": 3e6}, "grpc_keepalive_time: expected seconds from 0.001 to 1000000"),
        ({"grpc_max_connection_age": -1}, "grpc_max_connection_age: expected seconds from 0"),
        ({"host": "0.0.0.0"}, "host: other machines can reach 0.0.0.0 without TLS: set ssl_keyfile"),
        ({"host": "127.0.0.1.example.org", "port": -1}, "host: other machines can reach 127.0.0.1.example.org"),
        ({"ssl_ca_certs": __file__}, "ssl_ca_certs requires ssl_cert_reqs"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs: expected 0, 1 or 2"),
        ({"ssl_cert_reqs": 2}, "client certificates require ssl_ca_certs"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh requires"),
        ({"ssl_keyfile": "/nowhere"}, "ssl_keyfile: no such file"),
        ({"port": -1, "grpc_port": -1}, "expected at least one that is not -1"),
        (
            {"admin_host": "0.0.0.0"},
            "admin_host: an admin listener that other machines can reach requires API keys and TLS",
        ),
        ({"served_model_name": [""]}, "served_model_name: expected non-empty strings"),
        ({"strict": "yes"}, "strict: expected bool"),
        (
            {"chat_template_content_format": "text"},
            "chat_template_content_format: expected one of auto, string, openai",
        ),
        (
            {"disable_access_log_for_endpoints": ["/a,health"]},
            "endpoints: expected paths such as /health, got 'health'",
        ),
        ({"prot": 1}, "unknown server setting 'prot'"),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig.from_arguments(values)


def test_key_and_certificate_come_together(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("x")
    with pytest.raises(ConfigError, match="expected both or neither"):
        ServerConfig(ssl_keyfile=str(tmp_path / "key"))


def test_the_environment_adds_a_key() -> None:
    config = ServerConfig.from_arguments({"api_key": ["one"]}, {"JAXSERVE_API_KEY": "two"})
    assert config.api_key == ["one", "two"]
    assert config.has_keys


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key=["secret"]))


def test_listeners_bind_loopback_unless_told() -> None:
    config = ServerConfig()
    assert is_loopback(config.host)
    assert is_loopback(config.admin_host)
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "127.0.0.1.example.org", "machine", ""):
        assert not is_loopback(host)


def test_nothing_is_served_in_the_clear_unless_told() -> None:
    assert ServerConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"
    assert ServerConfig(host="0.0.0.0", port=-1, grpc_port=-1, uds="/tmp/x").uds


def parsed(*arguments: str) -> tuple[dict[str, Any], ServerConfig]:
    """What ``jaxserve serve`` makes of a command line."""
    options = cli._parser(["serve"]).parse_args(["serve", *command.with_config_file(arguments)])
    return command.serve_arguments(options)[:2]


def test_flags_reach_engine_and_server() -> None:
    engine, server = parsed("some/model", "--max-model-len", "1k", "--port", "1", "--served-model-name", "a", "b")
    assert engine == {"model": "some/model", "max_model_len": "1k"}
    assert (server.port, server.served_model_name) == (1, ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (8000, 8001, 8002)),
        (["--port", "9000"], (9000, 9001, 9002)),
        (["--port", "0"], (0, 0, 0)),
        (["--port", "-1"], (-1, 8001, 8002)),
        (["--port", "9000", "--grpc-port", "7"], (9000, 7, 9002)),
        (["--port", "9000", "--grpc-port", "-1", "--admin-port", "0"], (9000, -1, 0)),
        (["--port", "65535", "--grpc-port", "0", "--admin-port", "-1"], (65535, 0, -1)),
    ],
)
def test_grpc_and_admin_ports_follow_the_http_port(arguments: list[str], expected: tuple[int, int, int]) -> None:
    assert parsed(*arguments)[1].listen_ports == expected


def test_the_model_is_the_demo_model_unless_told() -> None:
    assert parsed()[0] == {"model": "demo"}


def test_lists_are_json() -> None:
    assert parsed("--allowed-origins", '["https://a.example"]')[1].allowed_origins == ["https://a.example"]
    with pytest.raises(SystemExit):
        parsed("--allowed-origins", "nothing")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: some/model\nport: 5\nmax-num-seqs: 3\nstrict: true\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\nallowed_origins: ['*']\nhf-overrides: {a: 1}\napi-key: [k]\n"
    )
    engine, server = parsed("--config", str(path), "--port", "6")
    assert engine == {
        "model": "some/model",
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": 1},
    }
    assert (server.port, server.strict, server.served_model_name) == (6, True, ["a", "b"])
    assert (server.allowed_origins, server.api_key) == (["*"], ["k"])


def test_a_flag_with_several_values_in_the_file_takes_no_argument(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("served-model-name: foo\n")
    engine, server = parsed("/my/model", "--config", str(path))
    assert engine == {"model": "/my/model"}
    assert server.served_model_name == ["foo"]
    path.write_text("model: other\nserved-model-name: foo\n")
    assert parsed("/my/model", "--config", str(path))[0] == {"model": "/my/model"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strict: 'no'", "strict: expected true or false, got 'no'"),
        ("strict: 0", "strict: expected true or false, got 0"),
        ("enable_prefix_caching: 'false'", "enable_prefix_caching: expected true or false, got 'false'"),
        ("quiet: 'no'", "quiet: expected true or false, got 'no'"),
        ("api_key: yes", "api_key: expected a value, got true or false"),
        ("hf-overrides: false", "hf-overrides: expected a value, got true or false"),
        ("api_keys: -sk-secret", "there is no flag --api_keys"),
        ("api_key.first: sk-secret", "there is no flag --api_key.first"),
        ("port: -sk", "argument --port: invalid int value: '-sk'"),
    ],
)
def test_a_value_in_the_file_that_a_flag_does_not_take_is_no_model(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr(engine_client, "spawn_engine", lambda: pytest.fail("the engine was started"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--config", str(path)])
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "sk-secret" not in shown


def test_values_in_the_file_may_begin_with_a_dash(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("api_key: -top secret\nserved_model_name: -name\nhf_overrides.a: -x=1\nhf_overrides.b: null\n")
    engine, server = parsed("--config", str(path))
    assert engine == {"model": "demo", "hf_overrides": {"a": "-x=1", "b": None}}
    assert (server.api_key, server.served_model_name) == (["-top secret"], ["-name"])
    path.write_text("model: -model\napi_key: ['-one', --two]\nserved_model_name: [a, b]\nport: null\nquiet: true\n")
    engine, server = parsed("--config", str(path))
    assert engine == {"model": "-model"}
    assert (server.api_key, server.served_model_name) == (["-one", "--two"], ["a", "b"])


NEEDS_PARSER = "enable_auto_tool_choice requires tool_call_parser: add --tool-call-parser"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["--enable-auto-tool-choice"], None),
        ([], "enable-auto-tool-choice: true\n"),
        (["--enable-auto-tool-choice"], "port: 5\n"),
        (["--enable-auto-tool-choice", "--reasoning-parser", "qwen3"], None),
    ],
)
def test_calling_tools_needs_a_parser(
    tmp_path: Path,
    arguments: list[str],
    file: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(file or "")
    given = [*arguments, *(() if file is None else ("--config", str(path)))]
    monkeypatch.setattr(engine_client, "spawn_engine", lambda: pytest.fail("the engine was started"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", *given])
    assert exit_.value.code == 2
    assert NEEDS_PARSER in capsys.readouterr().err
    assert parsed(*given, "--tool-call-parser", "hermes")[1].enable_auto_tool_choice


def test_calling_tools_needs_a_parser_however_a_server_is_made() -> None:
    config = ServerConfig(enable_auto_tool_choice=True)
    for engine in ({"model": "demo"}, {"model": "demo", "tool_call_parser": None}):
        with pytest.raises(ConfigError, match=NEEDS_PARSER):
            asyncio.run(serve(engine, config))
        with pytest.raises(ConfigError, match=NEEDS_PARSER):
            EngineClient(engine, config)
    EngineClient({"tool_call_parser": "hermes"}, config)
    EngineClient({}, ServerConfig())


def test_objects_may_be_given_part_by_part(tmp_path: Path) -> None:
    words = "--default-chat-template-kwargs.enable_thinking false --override-generation-config.temperature 0.5"
    engine, server = parsed("demo", *words.split())
    assert engine == {"model": "demo", "override_generation_config": {"temperature": 0.5}}
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    path = tmp_path / "config.yaml"
    path.write_text(
        "override-generation-config: {temperature: 0.1, top_p: 0.5}\nhf_overrides.rope_scaling.factor: 2\n"
        "default_chat_template_kwargs.enable_thinking: true\ndefault-chat-template-kwargs.system_name: a b\n"
    )
    engine, server = parsed("--config", str(path), *words.split())
    assert engine["override_generation_config"] == {"temperature": 0.5, "top_p": 0.5}
    assert engine["hf_overrides"] == {"rope_scaling": {"factor": 2}}
    assert server.default_chat_template_kwargs == {"enable_thinking": False, "system_name": "a b"}


def test_paths_without_log_lines() -> None:
    assert parsed("--disable-access-log-for-endpoints", "/health, /metrics")[1].quiet_paths == {"/health", "/metrics"}
    repeated = ("--disable-access-log-for-endpoints", "/health", "--disable-access-log-for-endpoints", "/ping,")
    assert parsed(*repeated)[1].quiet_paths == {"/health", "/ping"}
    assert ServerConfig().quiet_paths == frozenset()


def test_help_says_where_a_default_is_not_that_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert 'None: no other origin, unlike in vLLM, whose default is ``["*"]``.' in shown
    assert "Flags that take a JSON object also accept single keys" in shown


def test_what_a_broken_file_says_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('port: 5\napi-key: "sk-very-secret\n')
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", str(path)])
    shown = capsys.readouterr().err
    assert "cannot be read as YAML" in shown
    assert "very-secret" not in shown


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("a: [", "cannot be read"), ("- a", "expected a mapping")]
)
def test_bad_files_are_named(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--config", str(path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
