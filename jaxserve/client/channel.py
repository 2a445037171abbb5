"""Opens the gRPC connections of clients."""

import abc
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from jaxserve.api.errors import ConfigError
from jaxserve.client.failures import errors_of_calls

Metadata = tuple[tuple[str, str], ...]

# Responses may be long: the server limits them, not the client. Keepalive pings detect a dead server.
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Open a channel to ``host:port``, encrypted if credentials are given."""
    if credentials is None:
        return grpc.insecure_channel(target, _OPTIONS)
    return grpc.secure_channel(target, credentials, _OPTIONS)


def open_async_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Open a channel for asyncio; see ``open_channel``."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, _OPTIONS)
    return grpc.aio.secure_channel(target, credentials, _OPTIONS)


def call_metadata(api_key: str | None) -> Metadata:
    """Return the metadata of each call: the key, without surrounding white space, as the server reads it.

    Raises:
        ConfigError: The key has characters that metadata cannot carry. They are not shown because the key is secret.
    """
    if api_key is None:
        return ()
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key must be one line of printable ASCII characters")
    return (("authorization", f"Bearer {key}"),)


class Connection(abc.ABC):
    """A connection to a server.

    Args:
        target: ``host:port`` of the server's listener.
        api_key: The caller's key.
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
        self._channel = self._open_channel(target, credentials)
        self._open(self._channel)

    @staticmethod
    @abc.abstractmethod
    def _open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        """Open the channel to the server."""

    @abc.abstractmethod
    def _open(self, channel: Any) -> None:
        """Make the stubs of the services that are called."""


class BlockingConnection(Connection):
    """A connection for programs with threads, and a context manager that closes it."""

    _open_channel = staticmethod(open_channel)

    def close(self) -> None:
        """Close the connection and abort its calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        with errors_of_calls():
            return method(request, **self._how)
