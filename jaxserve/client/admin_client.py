"""The client of operators."""

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from jaxserve.client.channel import call_metadata, open_channel
from jaxserve.client.failures import errors_of_calls
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc


class AdminClient:
    """Operates a server; errors as those of ``Client``.

    Args:
        target: ``host:port`` of the server's admin listener.
        api_key: A key with the scope ``admin``.
        credentials: For TLS, such as ``grpc.ssl_channel_credentials(…)``; None for none.
        timeout_s: Seconds that a call may take; None for any time.
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
        """Return how busy the server is."""
        return self._call(self._admin.GetLoad, admin_pb2.GetLoadRequest())

    def drain(self, timeout_s: float | None = None) -> None:
        """End the server once its requests have ended.

        Args:
            timeout_s: Seconds that they may take; None for the server's setting.
        """
        self._call(self._admin.Drain, admin_pb2.DrainRequest(timeout_s=timeout_s))

    def reset_prefix_cache(self) -> None:
        """Make the server forget all cached pages."""
        self._call(self._admin.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest())

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests by the server's names for them; returns those that ran or waited."""
        found = self._call(self._admin.Abort, admin_pb2.AbortRequest(request_ids=request_ids))
        return list(found.aborted_request_ids)

    def start_profile(self) -> str:
        """Begin to record a profile of the engine; returns the server's folder for it."""
        return self._call(self._admin.StartProfile, admin_pb2.StartProfileRequest()).directory

    def stop_profile(self) -> str:
        """End the recording; returns the server's folder that has it."""
        return self._call(self._admin.StopProfile, admin_pb2.StopProfileRequest()).directory

    @contextlib.contextmanager
    def profile(self) -> Iterator[str]:
        """Record a profile while the block runs; gives the server's folder for it."""
        directory = self.start_profile()
        try:
            yield directory
        finally:
            self.stop_profile()

    def close(self) -> None:
        """End the connection."""
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
