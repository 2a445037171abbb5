"""Settings of the HTTP server that are off unless asked for: the tokenizer's description, paths without log lines."""

import logging
from typing import Any

import pytest

from tests.jaxserve.server.http_fakes import FakeEngine, make_server


def test_the_tokenizer_is_described_where_that_is_enabled() -> None:
    server = make_server(enable_tokenizer_info_endpoint=True)
    answer = server.get("/tokenizer_info")
    assert (answer.status, answer.json()) == (200, {"tokenizer_class": "Fake", "chat_template": "{{ messages }}"})
    assert server.post("/tokenizer_info", {}).status == 405
    missing = make_server().get("/tokenizer_info")
    assert (missing.status, missing.error["type"]) == (404, "NotFoundError")


def test_the_tokenizer_is_described_to_those_who_may_generate() -> None:
    server = make_server(enable_tokenizer_info_endpoint=True, api_key=["secret"])
    assert server.get("/tokenizer_info").status == server.post("/tokenize", {"prompt": "a"}).status == 401
    assert server.get("/tokenizer_info", authorization="Bearer secret").status == 200


def test_the_tokenizer_is_not_described_while_nothing_is_served() -> None:
    engine = FakeEngine()
    server = make_server(engine, enable_tokenizer_info_endpoint=True)
    server.frontend.ledger.close("draining")
    assert server.get("/tokenizer_info").status == 503


def logged(caplog: pytest.LogCaptureFixture, *paths: str, **settings: Any) -> list[str]:
    """The paths in the access log after requests to some."""
    server = make_server(**settings)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for path in paths:
            server.get(path)
    return [record.getMessage().split('"')[1].removeprefix("GET ") for record in caplog.records]


def test_some_paths_have_no_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    paths = ("/health", "/metrics", "/version", "/health/", "/v1/models", "/ping")
    quiet = ["/health, /metrics,", "/ping"]
    assert logged(caplog, *paths, disable_access_log_for_endpoints=quiet) == ["/version", "/health/", "/v1/models"]
    assert logged(caplog, *paths) == list(paths)
    assert logged(caplog, *paths, disable_access_log_for_endpoints=["/v1"]) == list(paths)


def test_paths_behind_a_proxy_have_none_either(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"root_path": "/api", "disable_access_log_for_endpoints": ["/health", "/api/ping"]}
    assert logged(caplog, "/api/health", "/api/ping", "/api/version", **settings) == ["/api/version"]
