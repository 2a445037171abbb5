"""Opens the gRPC connections of clients."""

import grpc
import grpc.aio

from jaxserve.api.errors import ConfigError

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
