"""Who may call what over gRPC."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.server.grpc_api import interceptor
from jaxserve.server.grpc_api.interceptor import ABSENT, ACCESS, ANYBODY, KNOWN
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from tests.grpc_servers import Serving, connected, run, serving

Code = grpc.StatusCode
KEYS = [
    {"key": "text-key", "name": "texts", "scopes": ["generate"]},
    {"key": "admin-key", "name": "operator", "scopes": ["admin"]},
    {"key": "metrics-key", "name": "watcher", "scopes": ["metrics"]},
]


def reflected_methods(target: str) -> dict[str, bool]:
    """Full names of all methods that a server's reflection tells of, and whether their requests are streams."""
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services()]
        return {
            f"/{service.full_name}/{method.name}": method.client_streaming
            for service in services
            for method in service.methods
        }


async def code_of(channel: grpc.aio.Channel, method: str, key: str | None) -> grpc.StatusCode:
    """How a call with an empty message ends; a stream that does not end counts as OK."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    # gRPC's streams of requests would fail by themselves where a call is refused before they have begun.
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=5)
    try:
        async for _ in call:
            return Code.OK
    except grpc.aio.AioRpcError as failure:
        return failure.code()
    finally:
        call.cancel()
    return await call.code()


@pytest.fixture
def auth_file(tmp_path: Path) -> str:
    """A file with a key for each scope."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    return str(path)


def listeners(there: Serving) -> Iterator[str]:
    """Both of a server's targets."""
    yield there.target
    yield there.admin_target


def test_the_table_has_all_methods_that_reflection_tells_of_and_no_other() -> None:
    async def main() -> None:
        async with serving() as there:
            public, admin = [set(await asyncio.to_thread(reflected_methods, target)) for target in listeners(there)]
            absent = {
                name for name, needed in ACCESS.items() if needed == ABSENT
            }  # or too new for this version of gRPC
            assert (public | admin) - absent == set(ACCESS) - absent
            assert {name for name in public if ACCESS[name] == "admin"} == set()
            assert {ACCESS[name] for name in admin} - {ABSENT} == {"admin", ANYBODY, KNOWN}

    run(main)


def test_every_method_asks_for_its_scope(auth_file: str) -> None:
    async def main() -> None:
        async with serving(auth_file=auth_file) as there:
            for target in listeners(there):
                async with connected(target) as channel:
                    for method, needed in ACCESS.items():
                        served = needed in (ANYBODY, KNOWN) or (needed == "admin") == (target == there.admin_target)
                        await check_method(channel, method, needed if served else None)

    async def check_method(channel: grpc.aio.Channel, method: str, needed: str | None) -> None:
        codes = {key: await code_of(channel, method, key) for key in (None, "wrong", "text-key", "admin-key")}
        if needed in (None, ABSENT):
            assert set(codes.values()) == {Code.UNIMPLEMENTED}, method
        elif needed == ANYBODY:
            assert Code.UNAUTHENTICATED not in codes.values() and Code.PERMISSION_DENIED not in codes.values(), method
        else:
            assert codes[None] is codes["wrong"] is Code.UNAUTHENTICATED, method
            refused = {"generate": ["admin-key"], "admin": ["text-key"], KNOWN: []}[needed]
            assert [key for key, code in codes.items() if code is Code.PERMISSION_DENIED] == refused, method

    run(main)


def test_without_keys_everybody_may_do_everything() -> None:
    async def main() -> None:
        async with serving(profile_dir="/profiles") as there:
            for target in listeners(there):
                async with connected(target) as channel:
                    for method in await asyncio.to_thread(reflected_methods, target):
                        if ACCESS[method] == ABSENT:
                            continue
                        code = await code_of(channel, method, None)
                        assert code not in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED), method

    run(main)


def test_a_method_that_the_table_forgets_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = "/jaxserve.v1.GenerationService/Generate"
    left = MappingProxyType({name: scope for name, scope in ACCESS.items() if name != forgotten})
    monkeypatch.setattr(interceptor, "ACCESS", left)

    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="no caller has access to") as failure:
                await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                    generation_pb2.GenerateRequest(text="x")
                )
            assert failure.value.code() is Code.PERMISSION_DENIED
            assert not there.engine.requests

    run(main)


@pytest.mark.parametrize("header", ["text-key", "Basic text-key", "Bearer", "Bearer  ", "bearer text-keyx"])
def test_headers_that_are_no_key(auth_file: str, header: str) -> None:
    async def main() -> None:
        async with serving(auth_file=auth_file) as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=(("authorization", header),))
            assert failure.value.code() is Code.UNAUTHENTICATED
            assert "text-key" not in str(failure.value)

    run(main)


def test_a_key_lets_in_and_its_holder_has_pages_of_its_own(auth_file: str) -> None:
    async def main() -> None:
        async with serving(auth_file=auth_file) as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            metadata = (("authorization", "Bearer text-key"),)
            await stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=metadata)
            own = there.engine.last.cache_salt
            assert own is not None and len(own) == 64
            await stub.Generate(generation_pb2.GenerateRequest(text="x", cache_salt=own), metadata=metadata)
            assert there.engine.last.cache_salt != own

    run(main)
