"""The client of the admin API."""

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from jaxserve.client.channel import call_metadata, open_channel
from jaxserve.client.failures import errors_of_calls
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc


class AdminClient:
    """Controls a server; raises the same errors as ``Client``.

    Args:
        target: ``host:port`` of the server's admin listener.
        api_key: A key with the scope ``admin``.
        credentials: TLS credentials, such as ``grpc.ssl_channel_credentials(…)``; None for plain text.
        timeout_s: Seconds after which a call times out; None for no limit.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
    ):
        self._how: dict[str, Any] = {"metadata": call_metadata(api_key), "timeout": timeout_s}
        self._channel = open_channel(target, credentials)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    def load(self) -> admin_pb2.GetLoadResponse:
        """Return the server's load."""
        return self._call(self._admin.GetLoad, admin_pb2.GetLoadRequest())

    def drain(self, timeout_s: float | None = None) -> None:
        """Stop accepting requests, wait for in-flight ones, and stop the server.

        Args:
            timeout_s: Seconds to wait before they are aborted; None for the server's setting.
        """
        self._call(self._admin.Drain, admin_pb2.DrainRequest(timeout_s=timeout_s))

    def reset_prefix_cache(self) -> None:
        """Clear the server's prefix cache."""
        self._call(self._admin.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest())

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests by the server's ids; return the ids that were running or waiting."""
        found = self._call(self._admin.Abort, admin_pb2.AbortRequest(request_ids=request_ids))
        return list(found.aborted_request_ids)

    def reshard(self, mesh: str | None = None, layout: str | None = None) -> admin_pb2.ReshardResponse:
        """Move the running engine to another mesh or layout, as ``LLM.reshard``; return what was done.

        Args:
            mesh: Devices along each axis, such as ``data=2,tensor=2``; None keeps the mesh.
            layout: Name of the layout; None keeps it.
        """
        return self._call(self._admin.Reshard, admin_pb2.ReshardRequest(mesh=mesh, layout=layout))

    def start_profile(self) -> str:
        """Start recording a profile of the engine; return the server's folder for it."""
        return self._call(self._admin.StartProfile, admin_pb2.StartProfileRequest()).directory

    def stop_profile(self) -> str:
        """Stop recording; return the server's folder with the profile."""
        return self._call(self._admin.StopProfile, admin_pb2.StopProfileRequest()).directory

    @contextlib.contextmanager
    def profile(self) -> Iterator[str]:
        """Record a profile while the block runs; yield the server's folder for it."""
        directory = self.start_profile()
        try:
            yield directory
        finally:
            self.stop_profile()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        with errors_of_calls():
            return method(request, **self._how)
