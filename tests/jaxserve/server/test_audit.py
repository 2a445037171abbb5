"""The audit log: what is in it, over HTTP and gRPC alike, and what is not."""

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.server.audit import audit, audit_file
from jaxserve.server.key_watch import KeyWatch
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc
from tests.grpc_servers import connected, run, serving
from tests.jaxserve.server.http_fakes import make_server

KEYS = [
    {"key": "text-key", "name": "texts", "scopes": ["generate"]},
    {"key": "admin-key", "name": "operator", "scopes": ["admin"]},
]


@pytest.fixture
def auth_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    return str(path)


def recorded(tmp_path: Path, work: Callable[[], Any]) -> list[dict[str, str]]:
    """The events of some work, without time and what differs from run to run."""
    path = tmp_path / "audit"
    with audit_file(str(path)):
        work()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(event.pop("time").endswith("+00:00") for event in events)
    for event in events:
        event.pop("address", None)
        event.pop("request_id", None)
    return events


def test_requests_refused_for_their_key_over_http(tmp_path: Path, auth_file: str) -> None:
    server = make_server(auth_file=auth_file)

    def work() -> None:
        for key, path in (("wrong", "/v1/models"), ("admin-key", "/v1/models\n{}"), ("text-key", "/v1/models")):
            server.get(path, authorization=f"Bearer {key}")
        server.get("/metrics", authorization="Bearer text-key")
        server.get("/livez")

    assert recorded(tmp_path, work) == [
        {"protocol": "http", "method": "GET /v1/models", "caller": "-", "result": "unknown API key"},
        {
            "protocol": "http",
            "method": "GET /metrics",
            "caller": "texts",
            "result": "this API key lacks the scope 'metrics'",
        },
    ]


def test_administration_over_grpc(tmp_path: Path, auth_file: str) -> None:
    async def main() -> None:
        async with serving(auth_file=auth_file) as there, connected(there.admin_target) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            for key in ("wrong", "text-key", "admin-key"):
                metadata = (("authorization", f"Bearer {key}"),)
                for method, request in (
                    (admin.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest()),
                    (admin.GetLoad, admin_pb2.GetLoadRequest()),
                ):
                    try:
                        await method(request, metadata=metadata)
                    except grpc.aio.AioRpcError:
                        pass
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.StartProfile(admin_pb2.StartProfileRequest(), metadata=metadata)

    service = "/jaxserve.v1.AdminService"
    found = [(event["method"], event["caller"], event["result"]) for event in recorded(tmp_path, lambda: run(main))]
    assert found[:5] == [
        (f"{service}/ResetPrefixCache", "-", "unknown API key"),
        (f"{service}/GetLoad", "-", "unknown API key"),
        (f"{service}/ResetPrefixCache", "texts", "this API key lacks the scope 'admin'"),
        (f"{service}/GetLoad", "texts", "this API key lacks the scope 'admin'"),
        (f"{service}/ResetPrefixCache", "operator", "ok"),
    ]
    (last,) = found[5:]
    assert last[:2] == (f"{service}/StartProfile", "operator")
    assert "profile" in last[2]


def test_reloads_of_keys(tmp_path: Path, auth_file: str) -> None:
    async def work() -> None:
        server = make_server(auth_file=auth_file)
        watch = KeyWatch(server.frontend)
        Path(auth_file).write_text(json.dumps(KEYS[1:]))
        server.frontend.end_callers = Mock(return_value=0)
        watch.check()
        Path(auth_file).write_text("[")
        watch.check()

    events = recorded(tmp_path, lambda: asyncio.run(work()))
    assert [event["result"].split(":")[0] for event in events] == ["ok", "auth_file"]
    assert events[0]["revoked"] == "texts"


def test_the_file_is_its_owners_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    for _ in range(2):
        with audit_file(str(path)):
            audit("server", "x" * 1000, "-", "ok", more=None)
    audit("server", "outside", "-", "ok")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["x" * 500] * 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_log: .*/none/audit cannot be opened: No such file"):
        with audit_file(str(tmp_path / "none" / "audit")):
            pass
