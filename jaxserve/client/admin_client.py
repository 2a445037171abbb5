"""The client of the admin API."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.client.channel import BlockingConnection
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc


class AdminClient(BlockingConnection):
    """Controls a server through its admin listener; arguments and errors are those of ``Client``.

    A server with API keys needs one of scope ``admin``.
    """

    def _open(self, channel: Any) -> None:
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(channel)

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
