"""The gRPC listeners: one for text, one for operators."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.errors import ConfigError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.admin import AdminServicer
from jaxserve.server.grpc_api.generation import GenerationServicer
from jaxserve.server.grpc_api.health import HealthService
from jaxserve.server.grpc_api.interceptor import CallInterceptor
from jaxserve.server.grpc_api.models import ModelServicer
from jaxserve.server.grpc_api.tokenization import TokenizationServicer
from jaxserve.server.proto.jaxserve.v1 import (
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2_grpc,
    tokenization_pb2_grpc,
)
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tls import make_grpc_credentials

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
"""The service whose health says whether the server can generate."""
_PUBLIC = (GENERATION, "jaxserve.v1.TokenizationService", "jaxserve.v1.ModelService")
_ADMIN = ("jaxserve.v1.AdminService",)

MAX_METADATA_BYTES = 16 << 10
"""Most that the metadata of a call may have."""
_MIN_PING_INTERVAL_MS = 10_000  # routers ping more often than gRPC's servers take by default
_FLUSH_S = 0.1  # for the last bytes of calls that have ended
_CONNECTIONS_AT_FULL = 16  # calls in all: as many as so many connections may hold, and far above the queue limit


class GrpcServer:
    """Listens for gRPC; gRPC's health service says ``""`` while the process lives, and of ``GENERATION`` what is told.

    Attributes:
        port: Of the public listener; None where there is none, or it has not started.
        admin_port: Of the admin listener; the same.

    Args:
        frontend: What runs behind it.
        on_drain: Begins a drain (see ``AdminServicer``).
    """

    def __init__(self, frontend: Frontend, on_drain: Callable[[float | None], None]):
        self.port: int | None = None
        self.admin_port: int | None = None
        self._frontend = frontend
        self._on_drain = on_drain
        self._servers: list[grpc.aio.Server] = []
        self._interceptor: CallInterceptor | None = None
        self._max_calls = _max_calls(frontend.config)
        self._health = HealthService(self._max_calls // 4)
        self._health.set(GENERATION, False)

    async def start(self) -> None:
        """Listens.

        Raises:
            ConfigError: An address that cannot be used, certificates that are wrong, or protobuf without native code.
        """
        check_protobuf()
        config = self._frontend.config
        self._interceptor = CallInterceptor(self._frontend.authenticator, config.stall_timeout)
        try:
            if config.grpc_port != -1:
                self.port = await self._listen(config.host, config.grpc_port, self._add_public, _PUBLIC)
            if config.admin_port != -1:
                self.admin_port = await self._listen(config.admin_host, config.admin_port, self._add_admin, _ADMIN)
        except BaseException:
            await self.stop(0.0)
            raise

    def set_serving(self, is_serving: bool) -> None:
        """Says whether the server can generate; those who watch learn it soon."""
        self._health.set(GENERATION, is_serving)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and ends those that run after so many seconds. A second time it does nothing.

        Health is answered all the while; who watches it does not keep the server.
        """
        servers, self._servers = self._servers, []
        if not servers or self._interceptor is None:
            return
        self._health.end()
        self._interceptor.refuse_calls()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interceptor.wait_idle(), grace_s)
        # Once each: a server of gRPC's that is told to stop while it stops crashes the process.
        await asyncio.gather(*(server.stop(min(grace_s, _FLUSH_S)) for server in servers))

    async def _listen(
        self, host: str, port: int, add: Callable[[grpc.aio.Server], None], services: Sequence[str]
    ) -> int:
        """Starts a listener; returns its port."""
        config = self._frontend.config
        assert self._interceptor is not None
        server = grpc.aio.server(
            interceptors=(self._interceptor,), options=_options(config), maximum_concurrent_rpcs=self._max_calls
        )
        add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if not config.disable_grpc_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        bound = _bind(server, host, port, config)
        await server.start()
        self._servers.append(server)
        return bound

    def _add_public(self, server: grpc.aio.Server) -> None:
        frontend = self._frontend
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(frontend), server)
        tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationServicer(frontend), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(frontend), server)

    def _add_admin(self, server: grpc.aio.Server) -> None:
        servicer = AdminServicer(self._frontend, self._on_drain)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)


def check_protobuf() -> None:
    """Raises unless protobuf has its native code: the one in Python is slow, and attacks on it are known.

    Raises:
        ConfigError: It has not.
    """
    kind = api_implementation.Type()
    if kind == "python":
        raise ConfigError("protobuf runs without its native code: install a wheel, and unset PROTOCOL_BUFFERS_PYTHON_…")


def _max_calls(config: ServerConfig) -> int:
    """Most calls at a time, of whatever kind: the last line of defence, which callers should not meet."""
    return max(_CONNECTIONS_AT_FULL * config.max_concurrent_streams, 4 * (config.max_num_queued_reqs or 0))


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    ages = {"age": config.grpc_max_connection_age, "idle": config.grpc_max_connection_idle}
    return [
        *((f"grpc.max_connection_{name}_ms", round(limit_s * 1000)) for name, limit_s in ages.items() if limit_s),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", round(config.grpc_keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.grpc_keepalive_timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(config.grpc_keepalive_timeout * 1000)),  # its name since gRPC 1.60
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, config: ServerConfig) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if config.has_tls:
            return server.add_secure_port(address, make_grpc_credentials(config))
        return server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"cannot listen on {address}: it is in use, or no address of this machine"
        raise ConfigError(message) from error
