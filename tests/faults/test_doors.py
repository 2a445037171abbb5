"""Who gets in: certificates and keys, on real listeners (failure list 24, 25)."""

import contextlib
import shutil
import ssl
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.client import AdminClient, Client
from scripts.server_child import RunningServer
from tests.certificates import Authority, Pair
from tests.hooks import PermissionDeniedError, UnauthenticatedError, UnavailableError
from tests.server_process import running_server

KEYS = """
- {key: writer, name: writer}
- {key: watcher, name: watcher, scopes: [metrics]}
- {key: operator, name: operator, scopes: [admin]}
"""


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """One that the server knows, and another."""
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "known"), Authority(folder / "other")


@pytest.fixture(scope="module")
def own(authorities: tuple[Authority, Authority]) -> Pair:
    """The server's key and certificate."""
    return authorities[0].sign("server")


@pytest.fixture(scope="module")
def guarded(authorities: tuple[Authority, Authority], own: Pair) -> Iterator[RunningServer]:
    """A server that wants certificates and keys."""
    keys = authorities[0].folder / "keys.yaml"
    keys.write_text(KEYS)
    flags = ("--ssl-keyfile", str(own.key), "--ssl-certfile", str(own.certificate), "--enable-ssl-refresh")
    flags += ("--ssl-ca-certs", str(authorities[0].pair.certificate), "--ssl-cert-reqs", "2", "--auth-file", str(keys))
    with running_server(*flags) as server:
        yield server


def https(known: Authority, client: Pair | None) -> ssl.SSLContext:
    """What an HTTPS client trusts and shows."""
    context = ssl.create_default_context(cafile=str(known.pair.certificate))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


def channel_credentials(known: Authority, client: Pair | None) -> grpc.ChannelCredentials:
    """The same for gRPC."""
    shown = () if client is None else (client.key.read_bytes(), client.certificate.read_bytes())
    return grpc.ssl_channel_credentials(known.pair.certificate.read_bytes(), *shown)


def gets_in(server: RunningServer, known: Authority, client: Pair | None) -> tuple[bool, bool]:
    """Whether HTTP and gRPC let a client in."""
    found: list[bool] = []
    try:
        found.append(httpx2.get(server.http + "/health", verify=https(known, client), timeout=20).status_code == 200)
    except httpx2.HTTPError:
        found.append(False)
    target = server.grpc.replace("127.0.0.1", "localhost")
    with Client(target, api_key="writer", credentials=channel_credentials(known, client), timeout_s=20.0) as rpc:
        try:
            found.append(rpc.generate("12+30=").outputs[0].text == "42")
        except UnavailableError:
            found.append(False)
    return found[0], found[1]


def test_only_certificates_that_are_known_get_in_and_new_ones_are_taken(
    guarded: RunningServer, authorities: tuple[Authority, Authority], own: Pair
) -> None:
    """Failure list 24."""
    known, other = authorities
    assert gets_in(guarded, known, known.sign("client")) == (True, True)
    assert gets_in(guarded, known, None) == (False, False)
    assert gets_in(guarded, known, other.sign("client")) == (False, False)
    assert gets_in(guarded, other, known.sign("client")) == (False, False)
    assert gets_in(guarded, known, known.sign("late", days=0)) == (False, False)
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(guarded.http.replace("https", "http") + "/health", timeout=20)
    renewed = other.sign("server")
    shutil.copy(renewed.key, own.key)
    shutil.copy(renewed.certificate, own.certificate)
    until_s = time.monotonic() + 30
    while gets_in(guarded, other, known.sign("client")) != (True, True):
        assert time.monotonic() < until_s, "the new certificate is not taken"
        time.sleep(0.5)


ROUTES = {
    ("GET", "/health"): None,
    ("GET", "/ping"): None,
    ("GET", "/version"): None,
    ("GET", "/"): None,
    ("GET", "/v1/models"): "writer",
    ("POST", "/v1/completions"): "writer",
    ("POST", "/v1/chat/completions"): "writer",
    ("POST", "/v1/embeddings"): "writer",
    ("POST", "/tokenize"): "writer",
    ("POST", "/detokenize"): "writer",
    ("GET", "/metrics"): "watcher",
    ("GET", "/status.json"): "watcher",
}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that wants keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    with running_server("--auth-file", str(keys)) as server:
        yield server


def status(server: RunningServer, method: str, path: str, key: str | None) -> int:
    """What a route answers."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if method == "GET":
        return httpx2.get(server.http + path, timeout=20, headers=headers).status_code
    headers["Content-Type"] = "application/json"
    return httpx2.post(server.http + path, timeout=20, headers=headers, content="{}").status_code


def test_every_door_asks_for_its_key(locked: RunningServer) -> None:
    """Failure list 25: HTTP's routes, and what gRPC's reflection tells of."""
    for (method, path), key in ROUTES.items():
        if key is None:
            assert status(locked, method, path, None) == 200, path
            continue
        assert status(locked, method, path, None) == 401, path
        assert status(locked, method, path, "nothing") == 401, path
        assert status(locked, method, path, "operator") == 403, path
        assert status(locked, method, path, key) in (200, 400), path
    for path in (
        "/v1/../metrics",
        "//v1/models",
        "/docs",
        "/openapi.json",
        "/v1/completions/",
        "/%2e%2e/metrics",
        "/start_profile",
    ):
        assert status(locked, "GET", path, None) in (401, 404), path
    assert methods(locked.grpc) == methods(locked.grpc) > set()
    for target in (locked.grpc, locked.admin):
        for method in methods(target):
            if method.startswith("/jaxserve."):
                assert code(target, method, None) is grpc.StatusCode.UNAUTHENTICATED, method
                assert code(target, method, "nothing") is grpc.StatusCode.UNAUTHENTICATED, method
                assert code(target, method, "watcher") is grpc.StatusCode.PERMISSION_DENIED, method
    with AdminClient(locked.admin, api_key="writer") as admin, pytest.raises(PermissionDeniedError):
        admin.load()
    with AdminClient(locked.admin) as admin, pytest.raises(UnauthenticatedError):
        admin.load()
    with AdminClient(locked.admin, api_key="operator") as admin:
        admin.load()


def methods(target: str) -> set[str]:
    """All methods of a listener."""
    with grpc.insecure_channel(target) as plain:
        database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(plain, _WithKey("operator")))
        found: set[str] = set()
        for service in database.get_services():
            described = database.FindFileContainingSymbol(service)
            for one in described.service:
                name = f"{described.package}.{one.name}"
                if name == service:
                    found |= {f"/{name}/{method.name}" for method in one.method}
        return found


def code(target: str, method: str, key: str | None) -> grpc.StatusCode:
    """How a call of a method with an empty message ends."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(target) as channel, contextlib.suppress(StopIteration):
        try:
            next(channel.unary_stream(method)(b"", metadata=metadata, timeout=20))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


class _WithKey(grpc.StreamStreamClientInterceptor):
    """Adds a key to calls."""

    def __init__(self, key: str):
        self._key = key

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See gRPC."""
        details = client_call_details._replace(metadata=[("authorization", f"Bearer {self._key}")])
        return continuation(details, request_iterator)
