"""How clients connect."""

import grpc
import grpc.aio

from jaxserve.errors import ConfigError

Metadata = tuple[tuple[str, str], ...]

# Answers may be long: the server, not the client, bounds them. Pings find a server that is gone.
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Return a channel to ``host:port``, encrypted where there are credentials."""
    if credentials is None:
        return grpc.insecure_channel(target, _OPTIONS)
    return grpc.secure_channel(target, credentials, _OPTIONS)


def open_async_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Return the same for asyncio."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, _OPTIONS)
    return grpc.aio.secure_channel(target, credentials, _OPTIONS)


def call_metadata(api_key: str | None) -> Metadata:
    """What each call carries: the key without white space around it, as the server reads it.

    Raises:
        ConfigError: The key has characters that metadata cannot carry. They are not shown: they may be most of it.
    """
    if api_key is None:
        return ()
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key must be one line of printable ASCII characters")
    return (("authorization", f"Bearer {key}"),)
