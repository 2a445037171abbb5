"""``AdminService``: what operators do."""

from collections.abc import Callable, Iterable

from jaxserve.errors import RequestError
from jaxserve.metric_types import Gauge, Metric
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.context import Context
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Operates a server.

    Args:
        frontend: What runs behind it.
        on_drain: Begins a drain; gets the seconds that running requests may take, None for the server's setting.
    """

    def __init__(self, frontend: Frontend, on_drain: Callable[[float | None], None]):
        self._frontend = frontend
        self._on_drain = on_drain

    async def GetLoad(self, request: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        """How busy the server is."""
        del request, context
        metrics = await self._frontend.engine.metrics()
        limits = self._frontend.limits
        return admin_pb2.GetLoadResponse(
            num_running=round(_gauge(metrics, "num_requests_running")),
            num_waiting=round(_gauge(metrics, "num_requests_waiting")),
            kv_cache_usage=_gauge(metrics, "kv_cache_usage_perc"),
            num_in_flight=limits.num_in_flight,
            is_draining=not limits.is_open,
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Takes no more requests, and ends the server when those that run have ended."""
        del context
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not 0 <= timeout_s < float("inf"):
            raise RequestError("timeout_s must be seconds from 0", parameter="timeout_s", value=timeout_s)
        self._on_drain(timeout_s)
        return admin_pb2.DrainResponse()

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Forgets all cached pages."""
        del request, context
        await self._frontend.engine.reset_prefix_cache()
        return admin_pb2.ResetPrefixCacheResponse()

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        """Begins to record a profile of the engine."""
        del request, context
        directory = self._profile_directory()
        await self._frontend.engine.start_profile(directory)
        return admin_pb2.StartProfileResponse(directory=directory)

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        """Ends the recording."""
        del request, context
        directory = self._profile_directory()
        await self._frontend.engine.stop_profile()
        return admin_pb2.StopProfileResponse(directory=directory)

    async def Abort(self, request: admin_pb2.AbortRequest, context: Context) -> admin_pb2.AbortResponse:
        """Ends requests by their full names."""
        del context
        ended = await self._frontend.engine.abort(list(request.request_ids))
        return admin_pb2.AbortResponse(aborted_request_ids=ended)

    def _profile_directory(self) -> str:
        directory = self._frontend.config.profile_dir
        if directory is None:
            raise NotImplementedRequestError("this server records no profiles: it was started without --profile-dir")
        return directory


def _gauge(metrics: Iterable[Metric], name: str) -> float:
    """The value of a gauge by its name without prefix; 0 where there is none."""
    for metric in metrics:
        if isinstance(metric, Gauge) and metric.name.rpartition(":")[2] == name:
            return float(metric.value)
    return 0.0
