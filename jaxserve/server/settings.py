"""Settings of a server: vLLM's flags where it has them."""

import dataclasses
import ipaddress
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jaxserve.api.config_checks import check_type
from jaxserve.api.errors import ConfigError
from jaxserve.log_output import LogFormat

QUEUED_SEQS = 4
"""Default of ``max_num_queued_reqs``: waiting sequences for each of ``max_num_seqs``."""
QUEUED_CONTEXTS = 64
"""Default of ``max_num_queued_tokens``, in multiples of ``max_model_len``."""

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]

DEFAULT_PORTS = (8001, 8002)
"""Ports of the gRPC and the admin listener of a server that disables HTTP (``port=-1``) and names no other."""

_KINDS = (bool, int, str, float, list, dict)
_SECONDS: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("request_timeout", "stall_timeout", "body_timeout", "shutdown_timeout"), 0),
        **dict.fromkeys(("watchdog_timeout", "startup_timeout", "drain_delay"), 0),
        **dict.fromkeys(("grpc_max_connection_age", "grpc_max_connection_idle"), 0),
        **dict.fromkeys(("chat_template_timeout", "grpc_keepalive_time", "grpc_keepalive_timeout"), 1e-3),
    }
)
"""Least value of each setting in seconds."""
_COUNTS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("max_prompts", "max_concurrent_streams", "max_num_queued_reqs", "max_num_queued_tokens"), 1),
        **dict.fromkeys(("keepalive_timeout", "max_log_len", "min_transfer_rate"), 0),
        **dict.fromkeys(("max_connections", "max_connections_per_address"), 1),
        "max_request_bytes": 1024,
        "max_admitted_bytes": 1 << 20,
    }
)
"""Least value of each setting that is a number."""
_MAX_S = 1_000_000
_MAX_PORT = 65535
_MAX_BYTES = 2**62
_MAX_COUNT = 2**31 - 1  # gRPC and sockets have 32 bits for numbers, and for milliseconds


class ListenPorts(NamedTuple):
    """Ports that a server listens on; 0 selects a free port, -1 means that the listener is disabled."""

    http: int
    grpc: int
    admin: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server: its listeners, access, limits and logs.

    Attributes:
        host: Address that HTTP and gRPC listen on. Use API keys and TLS for any address but loopback.
        port: Port of the OpenAI-compatible HTTP server; 0 selects a free port, -1 disables it. The gRPC listeners use
            the next two ports by default.
        grpc_port: Port of the gRPC server; 0 selects a free port, -1 disables it. None: ``port + 1``; 0 if ``port`` is
            0, and 8001 if HTTP is disabled.
        admin_host: Address of the admin listener; any but loopback requires API keys and TLS.
        admin_port: Port of the gRPC admin listener; 0 selects a free port, -1 disables it. None: ``port + 2``; 0 if
            ``port`` is 0, and 8002 if HTTP is disabled.
        uds: Path of a Unix socket that HTTP listens on instead of host and port.
        served_model_name: Model names that requests may use; responses name the first. None: the model's own name.
        api_key: An API key with access to generation (scope ``generate``) and metrics; may be repeated. The environment
            variable JAXSERVE_API_KEY adds one.
        auth_file: A YAML or JSON file of keys with names, scopes and limits (see ``jaxserve.server.auth``).
        share_prefix_cache: Share the prefix cache between different API keys.
        strict: Reject requests with unknown fields instead of listing the fields in a response header.
        chat_template_content_format: How the chat template gets message contents: ``string`` as one string, ``openai``
            as a list of parts, ``auto`` as a list if the template loops over contents, else as a string.
        trust_request_chat_template: Accept a chat template in a request.
        default_chat_template_kwargs: Defaults of the chat template's variables, as a JSON object.
        chat_template_timeout: Time limit in seconds for rendering a chat template, which takes milliseconds.
        response_role: Role of generated messages.
        enable_auto_tool_choice: Let the model choose to call tools; needs the engine's ``tool_call_parser``.
        return_tokens_as_token_ids: Return tokens in logprobs as ``token_id:7``.
        enable_prompt_tokens_details: Report the number of cached prompt tokens in usage.
        enable_force_include_usage: Report usage at the end of every stream.
        enable_server_load_tracking: Serve ``GET /load``.
        enable_tokenizer_info_endpoint: Serve ``GET /tokenizer_info``.
        enable_log_requests: Log each request when it arrives and when it ends.
        enable_log_outputs: Log each completion.
        max_log_len: Maximum number of characters of a prompt or completion in the log; None: no limit.
        enable_request_id_headers: Add the header ``X-Request-Id`` to responses.
        disable_access_log: Do not log a line for each HTTP request.
        disable_access_log_for_endpoints: Paths without an access log, such as ``/health,/metrics``; may be repeated.
        log_format: Form of the log: ``text``, or ``json`` with an object per line. Without a reader, lines are
            dropped and counted.
        audit_log: File that administration, requests refused for their key, and reloads of keys and certificates are
            appended to, as lines of JSON.
        uvicorn_log_level: Log level of the HTTP server.
        root_path: Path prefix that a reverse proxy strips.
        insecure: Allow listening without TLS on an address that other machines can reach: in a trusted network, or
            behind a proxy.
        ssl_keyfile: File of the TLS private key of HTTP and gRPC.
        ssl_certfile: File of the TLS certificate.
        ssl_ca_certs: File of the CA certificates that client certificates are verified against.
        ssl_cert_reqs: Client certificates: 0 not requested, 1 optional, 2 required.
        ssl_crl_file: File of the certificate revocation lists (PEM) of the authorities that sign client certificates:
            a certificate on one is refused, and so is any of an authority without a list. For HTTP over TLS 1.3; gRPC
            has no such lists, so that ``grpc_port`` and ``admin_port`` must be -1.
        enable_ssl_refresh: Use the TLS files' current contents for new connections when they change: key, certificate,
            authorities of clients, revocation lists.
        allowed_origins: Origins of web pages that may call the HTTP server (CORS), as a JSON list. None: no other
            origin, unlike in vLLM, whose default is ``["*"]``.
        allowed_methods: HTTP methods that those pages may use, as a JSON list.
        allowed_headers: Headers that those pages may send, as a JSON list.
        allow_credentials: Let those pages send cookies.
        allowed_hosts: Host names and addresses that HTTP requests may be for, such as ``api.example.com`` or
            ``*.example.com``; ``*`` allows any, and the flag may be repeated. Others get 403. None: any, but loopback
            names alone if the server listens on a loopback address without API keys, so that web pages cannot reach it
            by a name of their own (DNS rebinding).
        max_connections: Maximum number of connections of the HTTP listener, and of each gRPC listener; each takes a
            file descriptor.
        max_connections_per_address: Maximum number of HTTP connections of one client address; a proxy's is one. gRPC's
            library cannot limit them by address: there only ``max_connections`` holds.
        max_num_queued_reqs: Maximum number of waiting sequences; None: 4 times ``max_num_seqs``. An API key that has
            less than an equal part of those in flight is admitted nevertheless; the same holds for waiting tokens.
        max_num_queued_tokens: Maximum number of prompt tokens of waiting sequences; None: 64 times ``max_model_len``.
        max_admitted_bytes: Maximum number of bytes of host memory that all requests in flight take: bodies, texts,
            tokens, options, logprobs and outputs that wait, as estimated when they are admitted. Others are rejected
            (503, RESOURCE_EXHAUSTED). None: a quarter of the memory that is available at start, at least 256 MiB and
            16 times ``max_request_bytes``. A key's share of it is half if there are several
            (``max_memory_share`` in the auth file).
        max_request_bytes: Maximum size in bytes of an HTTP request body or a gRPC request message; 4 MiB is gRPC's own
            default, and a million tokens. gRPC's library holds messages that arrive, which do not count as admitted.
        max_prompts: Maximum number of prompts of one HTTP request.
        request_timeout: Time limit in seconds of requests without a deadline; 0: no limit.
        stall_timeout: Seconds after which a client is disconnected that neither sends the rest of its request nor reads
            the response; 0: never. Half of nginx' default, as clients of a model wait for every token.
        body_timeout: Seconds in which the whole body of an HTTP request must have arrived; 0: no limit. At 14 kB/s the
            longest body arrives in time.
        min_transfer_rate: Fewest bytes per second, on average after ``stall_timeout``, at which a client must send the
            body of an HTTP request and read a response that waits, over HTTP or gRPC; 0: no limit. Text that
            people read comes at less than that, and messages of a stream that leave at once do not count.
        keepalive_timeout: Seconds after which an idle HTTP connection is closed.
        grpc_keepalive_time: Seconds between pings on an idle gRPC connection.
        grpc_keepalive_timeout: Seconds to wait for the response to such a ping.
        grpc_max_connection_age: Seconds after which a gRPC connection accepts no more calls, so that clients reconnect,
            perhaps to another server; running calls continue. 0: never.
        grpc_max_connection_idle: Seconds after which a gRPC connection without calls is closed; 0: never.
        max_concurrent_streams: Maximum number of concurrent calls on one gRPC connection, through which a gateway may
            send the calls of all its users.
        disable_grpc_reflection: Disable gRPC server reflection.
        drain_delay: Seconds after SIGTERM in which requests are still accepted, while ``/readyz`` and ``/health`` say
            503, so that load balancers send no more.
        shutdown_timeout: Seconds to wait for running requests after SIGTERM.
        watchdog_timeout: Seconds without progress after which the engine process logs its stacks and exits; 0: never.
            One that sends not even a sign of life for so long is killed; in a group of processes that takes 15 s.
        startup_timeout: Seconds after which an engine process that is not ready logs its stacks and exits; it includes
            downloads and compilation. 0: never.
        restart_engine: Restart the engine process if it exits.
        otlp_traces_endpoint: URL to send OpenTelemetry traces to; requires the extra ``otel``.
        vllm_metric_names: Also export metrics under their vLLM names.
        profile_dir: Directory for profiles; None: profiling is disabled.
        disable_status_page: Do not serve the status page at ``/``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    uds: str | None = None
    served_model_name: list[str] | None = None
    api_key: list[str] | None = dataclasses.field(default=None, repr=False)
    auth_file: str | None = None
    share_prefix_cache: bool = False
    strict: bool = False
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] | None = None
    chat_template_timeout: float = 5.0
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_server_load_tracking: bool = False
    enable_tokenizer_info_endpoint: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int | None = None
    enable_request_id_headers: bool = False
    disable_access_log: bool = False
    disable_access_log_for_endpoints: list[str] | None = None
    log_format: LogFormat = "text"
    audit_log: str | None = None
    uvicorn_log_level: LogLevel = "warning"
    root_path: str = ""
    insecure: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_crl_file: str | None = None
    enable_ssl_refresh: bool = False
    allowed_origins: list[str] | None = None
    allowed_methods: list[str] | None = None
    allowed_headers: list[str] | None = None
    allow_credentials: bool = False
    allowed_hosts: list[str] | None = None
    max_connections: int = 8192
    max_connections_per_address: int = 1024
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_admitted_bytes: int | None = None
    max_request_bytes: int = 4 << 20
    max_prompts: int = 1024
    request_timeout: float = 0.0
    stall_timeout: float = 30.0
    body_timeout: float = 300.0
    min_transfer_rate: int = 1024
    keepalive_timeout: int = 5
    grpc_keepalive_time: float = 30.0
    grpc_keepalive_timeout: float = 10.0
    grpc_max_connection_age: float = 0.0
    grpc_max_connection_idle: float = 600.0
    max_concurrent_streams: int = 1024
    disable_grpc_reflection: bool = False
    drain_delay: float = 0.0
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 300.0
    startup_timeout: float = 3600.0
    restart_engine: bool = False
    otlp_traces_endpoint: str | None = None
    vllm_metric_names: bool = False
    profile_dir: str | None = None
    disable_status_page: bool = False

    @classmethod
    def from_arguments(
        cls, arguments: Mapping[str, Any], environment: Mapping[str, str] = MappingProxyType({})
    ) -> "ServerConfig":
        """Return the given settings with those of the environment.

        Raises:
            ConfigError: An unknown name, or a value that is wrong.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in arguments:
            if name not in known:
                raise ConfigError(f"unknown server setting {name!r}")
        values = dict(arguments)
        key = environment.get("JAXSERVE_API_KEY")
        if key:
            values["api_key"] = [*(values.get("api_key") or ()), key]
        return cls(**_typed(values, typing.get_type_hints(cls)))

    def __post_init__(self):
        _check_numbers(vars(self))
        _check_paths(vars(self), self.quiet_paths)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile: expected both or neither")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs: client certificates require ssl_ca_certs")
        if self.ssl_ca_certs and not (self.ssl_cert_reqs and self.has_tls):
            raise ConfigError("ssl_ca_certs requires ssl_cert_reqs, ssl_keyfile and ssl_certfile")
        if self.enable_ssl_refresh and not self.has_tls:
            raise ConfigError("enable_ssl_refresh requires ssl_keyfile and ssl_certfile")
        ports = self.listen_ports
        if self.ssl_crl_file and not self.ssl_ca_certs:
            raise ConfigError("ssl_crl_file requires ssl_ca_certs and ssl_cert_reqs")
        if self.ssl_crl_file and (ports.grpc, ports.admin) != (-1, -1):
            raise ConfigError(
                "ssl_crl_file: gRPC cannot read revocation lists and would let revoked clients in; set grpc_port and "
                "admin_port to -1"
            )
        if ports.http == -1 and ports.grpc == -1 and self.uds is None:
            raise ConfigError("port and grpc_port: expected at least one that is not -1")
        if not (self.has_tls or self.insecure or is_loopback(self.host)) and ports[:2] != (-1, -1):
            expected = "set ssl_keyfile and ssl_certfile, or insecure in a trusted network"
            raise ConfigError(f"host: other machines can reach {self.host} without TLS: {expected}")
        if ports.admin != -1 and not is_loopback(self.admin_host) and not (self.has_tls and self.has_keys):
            raise ConfigError("admin_host: an admin listener that other machines can reach requires API keys and TLS")

    def check_engine(self, arguments: Mapping[str, Any]) -> None:
        """Check that an engine has what these settings require.

        Args:
            arguments: The engine's.

        Raises:
            ConfigError: Tools are to be called, and nothing says how the model writes calls.
        """
        if self.enable_auto_tool_choice and arguments.get("tool_call_parser") is None:
            raise ConfigError("enable_auto_tool_choice requires tool_call_parser: add --tool-call-parser auto")

    def queued_reqs_limit(self, max_num_seqs: int) -> int:
        """Return the maximum number of waiting sequences of an engine with ``max_num_seqs``."""
        return self.max_num_queued_reqs or QUEUED_SEQS * max_num_seqs

    @property
    def listen_ports(self) -> ListenPorts:
        """Ports of the three listeners, with the defaults that follow from ``port``."""
        following = {-1: DEFAULT_PORTS, 0: (0, 0)}.get(self.port, (self.port + 1, self.port + 2))
        given = (self.grpc_port, self.admin_port)
        grpc, admin = (default if port is None else port for port, default in zip(given, following, strict=True))
        return ListenPorts(self.port, grpc, admin)

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths whose requests are not in the access log."""
        given = ",".join(self.disable_access_log_for_endpoints or ()).split(",")
        return frozenset(path.strip() for path in given if path.strip())

    @property
    def has_tls(self) -> bool:
        """Whether HTTP and gRPC are encrypted."""
        return self.ssl_certfile is not None

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_key) or self.auth_file is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any address
        return False


def queued_tokens_limit(max_num_queued_tokens: int | None, max_model_len: int) -> int:
    """Return the maximum number of waiting prompt tokens, for a context of ``max_model_len`` tokens."""
    return max_num_queued_tokens or QUEUED_CONTEXTS * max_model_len


def _typed(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Check that each value has its field's type; return them with integers in place of floats converted."""
    checked = dict(values)
    for name, value in values.items():
        kinds = typing.get_args(types[name]) or (types[name],)
        if value is None and type(None) in kinds:
            continue
        kind = next((found for one in kinds if (found := typing.get_origin(one) or one) in _KINDS), None)
        if isinstance(value, bool) and kind is not bool:
            raise ConfigError(f"{name}: expected {kind.__name__ if kind else kinds}, got {value!r}")
        if kind is float and isinstance(value, int):
            checked[name] = float(value)
        elif kind is not None:
            check_type(name, value, kind)
        elif value not in kinds:
            raise ConfigError(f"{name}: expected one of {', '.join(map(str, kinds))}, got {value!r}")
        if isinstance(value, list) and not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{name}: expected non-empty strings")
    return checked


def _check_numbers(values: Mapping[str, Any]) -> None:
    for offset, name in enumerate(("port", "grpc_port", "admin_port")):
        port = values[name]
        if port is not None and not -1 <= port <= _MAX_PORT:
            raise ConfigError(f"{name}: expected a port from 0 to {_MAX_PORT}, or -1 for none, got {port}")
        if port is None and values["port"] + offset > _MAX_PORT:
            raise ConfigError(f"{name}: its default, port + {offset}, exceeds {_MAX_PORT}; set {name} or a lower port")
    for name, least in _SECONDS.items():
        if not least <= values[name] <= _MAX_S:
            raise ConfigError(f"{name}: expected seconds from {least:g} to {_MAX_S}, got {values[name]}")
    for name, least in _COUNTS.items():
        value = values[name]
        most = _MAX_BYTES if name == "max_admitted_bytes" else _MAX_COUNT
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name}: expected a number from {least} to {most}, got {value}")
    if values["ssl_cert_reqs"] not in (0, 1, 2):
        raise ConfigError(f"ssl_cert_reqs: expected 0, 1 or 2, got {values['ssl_cert_reqs']}")


def _check_paths(values: Mapping[str, Any], quiet_paths: Iterable[str]) -> None:
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_crl_file", "auth_file"):
        path = values[name]
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: no such file: {path!r}")
    for path in sorted(quiet_paths):
        if not path.startswith("/"):
            raise ConfigError(f"disable_access_log_for_endpoints: expected paths such as /health, got {path!r}")
