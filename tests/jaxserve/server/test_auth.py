"""Keys, scopes, tenants, and what an auth file may say."""

import hashlib
from pathlib import Path

import pytest

from jaxserve import ConfigError
from jaxserve.server.auth import Authenticator
from jaxserve.server.errors import PermissionDeniedError, UnauthenticatedError
from jaxserve.server.settings import ServerConfig


def test_without_keys_everybody_may_do_everything() -> None:
    caller = Authenticator(ServerConfig()).caller(None)
    for scope in ("generate", "metrics", "admin"):
        caller.check_scope(scope)
    assert caller.tenant is None


def test_a_key_lets_in_but_not_for_administration() -> None:
    authenticator = Authenticator(ServerConfig(api_key=["first", "second"]))
    caller = authenticator.caller("Bearer second")
    assert caller.name == "key-2"
    caller.check_scope("generate")
    with pytest.raises(PermissionDeniedError, match="lacks the scope 'admin'"):
        caller.check_scope("admin")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic first", "first", "Bearer firs", "Bearer \udcff"]
)
def test_others_are_refused_without_a_hint(header: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as failure:
        Authenticator(ServerConfig(api_key=["first"])).caller(header)
    assert "first" not in str(failure.value)


def test_holders_of_different_keys_share_no_pages_unless_told() -> None:
    apart = Authenticator(ServerConfig(api_key=["a", "b"])).callers
    assert apart[0].tenant != apart[1].tenant
    together = Authenticator(ServerConfig(api_key=["a", "b"], share_prefix_cache=True)).callers
    assert [caller.tenant for caller in together] == [None, None]


def written(tmp_path: Path, text: str) -> Authenticator:
    """An authenticator with an auth file."""
    path = tmp_path / "auth.yaml"
    path.write_text(text)
    return Authenticator(ServerConfig(auth_file=str(path)))


def test_an_auth_file_names_holders_scopes_and_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    authenticator = written(
        tmp_path,
        f"""
        - {{key: one, name: team-a, max_concurrent_requests: 3, requests_per_minute: 10}}
        - {{sha256: {digest}, name: ops, scopes: [admin, metrics], tenant: team-a}}
        """,
    )
    team, operator = authenticator.caller("Bearer one"), authenticator.caller("bearer other")
    assert (team.name, team.max_concurrent_requests, team.requests_per_minute, team.tenant) == (
        "team-a",
        3,
        10,
        "team-a",
    )
    assert (operator.scopes, operator.tenant) == ({"admin", "metrics"}, "team-a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("{}", "expected a list of keys"),
        ("[1]", "entry 0: expected a mapping"),
        ("[{key: hidden, name: a, role: b}]", "entry 0: unknown field; fields: key, sha256"),
        ("[{key: hidden, name: a, hidden: b}]", "unknown field; fields: "),
        ("[{key: hidden}]", "name: expected 1 to 64"),
        ("[{key: hidden, name: 'a b'}]", "name: expected 1 to 64"),
        ("[{key: hidden, name: a, scopes: [root]}]", "scopes: expected some of"),
        ("[{key: hidden, name: a, scopes: admin}]", "scopes: expected some of"),
        ("[{key: hidden, name: a, scopes: [[generate]]}]", "scopes: expected some of"),
        ("[{key: hidden, name: a, requests_per_minute: 0}]", "requests_per_minute: expected an integer of at least 1"),
        ("[{name: a}]", "expected either 'key'"),
        ("[{key: hidden, sha256: hidden, name: a}]", "expected either 'key'"),
        ("[{key: hidden, name: a}, {key: hidden, name: b}]", "same name or the same key"),
        ("[{key: hidden, name: a}, {key: hidden2, name: a}]", "same name or the same key"),
        ("[{key: hidden, name: a, tenant: 3}]", "tenant: expected a string"),
    ],
)
def test_bad_auth_files_are_named_and_not_quoted(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        written(tmp_path, text)
    assert "hidden" not in str(failure.value)


@pytest.mark.parametrize("entry", ["{key: other, name: key-1}", "{key: first, name: a}"])
def test_an_auth_file_does_not_name_the_callers_of_plain_keys(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "auth.yaml"
    path.write_text(f"[{entry}]")
    with pytest.raises(ConfigError, match="two callers have the same name or the same key"):
        Authenticator(ServerConfig(api_key=["first"], auth_file=str(path)))
