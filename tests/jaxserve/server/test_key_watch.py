"""The auth file while a server runs: what is read again, expiry, limits by tokens and priority, and use by key."""

import logging
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import yaml

from jaxserve.api.errors import ConfigError, OverloadedError
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.errors import UnauthenticatedError
from jaxserve.server.key_watch import KeyWatch
from jaxserve.server.settings import ServerConfig
from jaxserve.server.usage import KeyUsage, Usage
from tests.jaxserve.server.http_fakes import Server, make_server

HELLO = {"prompt": "Hi"}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump([{"key": entry["name"], **entry} for entry in entries]))
    return path


def watched(tmp_path: Path, *entries: dict[str, Any]) -> tuple[Server, KeyWatch, Path]:
    """A server with an auth file, and what watches the file; keys are the names."""
    path = write(tmp_path / "keys.yaml", *entries)
    server = make_server(auth_file=str(path))
    server.frontend.end_callers = Mock(return_value=2)
    return server, KeyWatch(server.frontend), path


def ends(server: Server) -> Mock:
    """What ends requests of callers."""
    return cast("Mock", server.frontend.end_callers)


def status(server: Server, key: str, body: dict[str, Any] = HELLO) -> int:
    return server.post("/v1/completions", body, authorization=f"Bearer {key}").status


def test_a_changed_file_adds_and_revokes_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, watch, path = watched(tmp_path, {"name": "old"}, {"name": "kept"})
    watch.check()
    assert [status(server, key) for key in ("old", "kept", "new")] == [200, 200, 401]
    write(path, {"name": "kept"}, {"name": "new"})
    with caplog.at_level(logging.INFO):
        watch.check()
    assert [status(server, key) for key in ("old", "kept", "new")] == [401, 200, 200]
    (names, error), _ = ends(server).call_args
    assert names == {"old"}
    assert isinstance(error, UnauthenticatedError)
    assert "the auth file was read again: 2 keys; revoked: old, whose 2 requests were ended" in caplog.text
    watch.check()
    assert ends(server).call_count == 1


def test_another_key_under_a_name_revokes_the_one_before(tmp_path: Path) -> None:
    server, watch, path = watched(tmp_path, {"name": "team"})
    write(path, {"name": "team", "key": "another"})
    watch.reload()
    assert (status(server, "team"), status(server, "another")) == (401, 200)
    assert ends(server).call_args[0][0] == {"team"}


@pytest.mark.parametrize("text", ["", "[", "[{name: a}]", "[{name: a, key: b}, {name: a, key: c}]"])
def test_a_file_with_a_mistake_changes_nothing(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    server, watch, path = watched(tmp_path, {"name": "old"})
    path.write_text(text)
    watch.check()
    assert status(server, "old") == 200
    assert "the changed auth file is not used, and the keys before it stay valid: " in caplog.text
    path.unlink()
    watch.check()
    assert status(server, "old") == 200
    assert not ends(server).called


def test_keys_expire(tmp_path: Path) -> None:
    server, watch, _ = watched(tmp_path, {"name": "a", "expires": "2001-01-31"}, {"name": "b", "expires": "2999-01-31"})
    assert [status(server, key) for key in "ab"] == [401, 200]
    watch.check()
    assert ends(server).call_args[0][0] == {"a"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("2030-01-31", 1896048000.0),
        ("2030-01-31T12:00:00Z", 1896091200.0),
        ("'2030-01-31T12:00:00'", 1896091200.0),
        ("2030-01-31T12:00:00+02:00", 1896084000.0),
    ],
)
def test_forms_of_expiry(tmp_path: Path, written: str, expected: float) -> None:
    (tmp_path / "keys.yaml").write_text(f"[{{name: a, key: b, expires: {written}}}]")
    (caller,) = Authenticator(ServerConfig(auth_file=str(tmp_path / "keys.yaml"))).callers
    assert caller.expires_s == expected


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("expires: soon", "expires: expected a date or an ISO 8601 time"),
        ("expires: 5", "expires: expected a date or an ISO 8601 time"),
        ("min_priority: x", "min_priority: expected an integer"),
        ("tokens_per_minute: 0", "tokens_per_minute: expected an integer of at least 1"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, field: str, message: str) -> None:
    (tmp_path / "keys.yaml").write_text(f"[{{name: a, key: b, {field}}}]")
    with pytest.raises(ConfigError, match=f"auth_file: entry 0: {message}"):
        Authenticator(ServerConfig(auth_file=str(tmp_path / "keys.yaml")))


def test_a_key_cannot_go_before_its_priority(tmp_path: Path) -> None:
    server, _, _ = watched(tmp_path, {"name": "low", "min_priority": 5}, {"name": "any"})
    for key, asked, used in (("low", {}, 5), ("low", {"priority": -3}, 5), ("low", {"priority": 9}, 9)):
        assert status(server, key, {**HELLO, **asked}) == 200
        assert server.engine.request.priority == used
    assert status(server, "any", {**HELLO, "priority": -3}) == 200
    assert server.engine.request.priority == -3


def test_tokens_of_the_last_minute_are_limited() -> None:
    now = 100.0
    usage = KeyUsage(lambda: now)
    caller = Caller("a", frozenset(), tokens_per_minute=10)
    usage.check_rate(caller)
    usage.add_tokens("a", 5, 0)
    usage.add_tokens("b", 50, 50)
    usage.check_rate(caller)
    now = 130.5
    usage.add_tokens("a", 3, 4)
    with pytest.raises(OverloadedError, match="this API key may use 10 tokens per minute") as refused:
        usage.check_rate(caller)
    assert refused.value.retry_after_s == 30.0  # the first five count no more
    now = 160.0
    usage.check_rate(caller)
    assert usage.by_name["a"] == Usage(0, 8, 4)
    usage.forget({"a"})
    assert "a" not in usage.by_name and usage.total == Usage(0, 58, 54)


def test_use_is_limited_and_measured_by_key(tmp_path: Path) -> None:
    server, watch, path = watched(tmp_path, {"name": "small", "tokens_per_minute": 3}, {"name": "other"})
    assert [status(server, "small"), status(server, "small"), status(server, "other")] == [200, 429, 200]
    text = server.get("/metrics", authorization="Bearer other").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("jaxserve:key_"))
    shown = {name.split("{")[0] + name.split("key=")[1].split('"')[1]: float(value) for name, value in values.items()}
    assert shown["jaxserve:key_requests_totalsmall"] == shown["jaxserve:key_requests_totalother"] == 1
    assert shown["jaxserve:key_prompt_tokens_totalsmall"] > 0
    assert shown["jaxserve:key_generation_tokens_totalother"] > 0
    write(path, {"name": "other"})
    watch.check()
    assert 'key="small"' not in server.get("/metrics", authorization="Bearer other").body.decode()


def test_clocks_of_expiry_are_of_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, _ = watched(tmp_path, {"name": "a", "expires": "2030-01-31T12:00:00Z"})
    """As they were when keys were read: a clock that jumps ends no key, until the file is read again."""
    day = 1896091200.0
    for now, found in ((day - 60, 200), (day, 401)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        server.frontend.authenticator.reload()
        assert status(server, "a") == found
    monkeypatch.setattr(time, "time", lambda: day - 60)
    assert status(server, "a") == 401
