"""The gRPC listeners, one for clients and one for operators, and gRPC's health service."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.api.errors import ConfigError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.calls import Context, end_call
from jaxserve.server.grpc_api.generation import GenerationServicer
from jaxserve.server.grpc_api.interceptor import CallInterceptor
from jaxserve.server.grpc_api.open_streams import MAX_CHECKS, MAX_REFLECTIONS, max_watchers
from jaxserve.server.grpc_api.services import AdminServicer, ModelServicer, TokenizationServicer
from jaxserve.server.grpc_api.wakeups import whole_wakeups
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
"""The service whose health tells whether the server can generate."""
_PUBLIC = (GENERATION, "jaxserve.v1.TokenizationService", "jaxserve.v1.ModelService")
_ADMIN = ("jaxserve.v1.AdminService",)

MAX_METADATA_BYTES = 16 << 10
"""Most bytes of a call's metadata."""
_MIN_PING_INTERVAL_MS = 10_000  # routers ping more often than gRPC servers accept by default
_FLUSH_S = 0.1  # to send the last bytes of calls that have ended
_CONNECTIONS_AT_FULL = 16  # the total limit of calls is that of this many connections
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class GrpcServer:
    """Listens for gRPC. Its health service says ``""`` while the process lives, and of ``GENERATION`` what is set.

    Attributes:
        port: Of the public listener; None if there is none, or it has not started.
        admin_port: Of the admin listener; the same.

    Args:
        frontend: The front end.
        on_drain: Starts a drain (see ``AdminServicer``).
    """

    def __init__(self, frontend: Frontend, on_drain: Callable[[float | None], None]):
        self.port: int | None = None
        self.admin_port: int | None = None
        self._frontend = frontend
        self._on_drain = on_drain
        self._servers: list[grpc.aio.Server] = []
        config = frontend.config
        # The last line of defence: far more than admission control lets in.
        self._max_calls = max(
            _CONNECTIONS_AT_FULL * config.max_concurrent_streams, 4 * (config.max_num_queued_reqs or 0)
        )
        limits = (config.stall_timeout, self._max_calls, config.min_transfer_rate)
        self._interceptor = CallInterceptor(frontend.authenticator, frontend.ledger, *limits)
        self._health = HealthService(max_watchers(self._max_calls))
        self._health.set(GENERATION, False)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: An address that cannot be used, wrong certificates, or protobuf without native code.
        """
        check_protobuf()
        config, frontend = self._frontend.config, self._frontend
        ports = config.listen_ports
        try:
            if ports.grpc != -1:
                server = self._make_server(_PUBLIC)
                generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(frontend), server)
                tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationServicer(frontend), server)
                model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(frontend), server)
                self.port = await self._listen(server, config.host, ports.grpc)
            if ports.admin != -1:
                server = self._make_server(_ADMIN)
                servicer = AdminServicer(frontend, self._on_drain)
                admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
                self.admin_port = await self._listen(server, config.admin_host, ports.admin)
        except BaseException:
            await self.stop(0.0)
            raise

    def set_serving(self, is_serving: bool) -> None:
        """Set whether the server can generate, for health checks."""
        self._health.set(GENERATION, is_serving)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, and abort those in flight after a grace period in seconds. A second call does nothing.

        Health is served meanwhile; a call that watches it does not delay the stop.
        """
        servers, self._servers = self._servers, []
        if not servers:
            return
        self._health.end()
        self._interceptor.refuse_calls()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interceptor.wait_idle(), grace_s)
        # Once each: a gRPC server that is told to stop while it stops crashes the process.
        await asyncio.gather(*(server.stop(min(grace_s, _FLUSH_S)) for server in servers))

    def _make_server(self, services: Sequence[str]) -> grpc.aio.Server:
        config = self._frontend.config
        # Beside the calls, those that need no key have places of their own.
        max_others = max_watchers(self._max_calls) + MAX_CHECKS + MAX_REFLECTIONS
        with whole_wakeups(asyncio.get_running_loop()):
            server = grpc.aio.server(
                interceptors=(self._interceptor,),
                options=_options(config),
                maximum_concurrent_rpcs=self._max_calls + max_others,
            )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if not config.disable_grpc_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    async def _listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Start a server; return its port."""
        config = self._frontend.config
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if config.has_tls:
                bound = server.add_secure_port(address, make_grpc_credentials(config))
            else:
                bound = server.add_insecure_port(address)
        except RuntimeError as error:
            message = f"cannot listen on {address}: it is in use, or not an address of this machine"
            raise ConfigError(message) from error
        await server.start()
        self._servers.append(server)
        return bound


def check_protobuf() -> None:
    """Raise ConfigError unless protobuf has its native code: the pure-Python one is slow and has known attacks."""
    if api_implementation.Type() == "python":
        raise ConfigError("protobuf runs without its native code: install a wheel, and unset PROTOCOL_BUFFERS_PYTHON_…")


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    ages = {"age": config.grpc_max_connection_age, "idle": config.grpc_max_connection_idle}
    return [
        *((f"grpc.max_connection_{name}_ms", round(limit_s * 1000)) for name, limit_s in ages.items() if limit_s),
        # The library has no limit by address. Connections that do not begin end soon, and so do those without calls.
        *((("grpc.server_handshake_timeout_ms", round(config.stall_timeout * 1000)),) if config.stall_timeout else ()),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", round(config.grpc_keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.grpc_keepalive_timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(config.grpc_keepalive_timeout * 1000)),  # its name since gRPC 1.60
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


class HealthService(health_pb2_grpc.HealthServicer):
    """gRPC's health service: ``""`` serves while the process lives, other services as ``set`` says.

    The library's own holds a lock while it writes, so that one watcher that does not read would stop it.

    Args:
        max_watchers: Most calls that may watch at a time, since watching needs no key.
    """

    def __init__(self, max_watchers: int):
        self._max_watchers = max_watchers
        self._statuses: dict[str, Any] = {"": _SERVING}
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = False

    def set(self, service: str, is_serving: bool) -> None:
        """Set whether a service serves, and notify watchers. Without effect after ``end``."""
        if not self._is_ending:
            self._set({service: _SERVING if is_serving else _NOT_SERVING})

    def end(self) -> None:
        """Set all services to not serving, for good."""
        self._is_ending = True
        self._set(dict.fromkeys(self._statuses, _NOT_SERVING))

    def _set(self, statuses: dict[str, Any]) -> None:
        self._statuses |= statuses
        for changed in self._watchers:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse | None:
        """Return whether a service serves."""
        status = self._statuses.get(request.service)
        if status is not None:
            return health_pb2.HealthCheckResponse(status=status)
        await end_call(context, grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:100]!r}")
        return None

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send whether a service serves, now and after each change. A slow reader may miss short changes."""
        if len(self._watchers) >= self._max_watchers:
            message = f"too many watchers: {self._max_watchers} calls watch already"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        changed, sent = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _UNKNOWN)
                if status != sent:
                    sent = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self._watchers.remove(changed)
