"""Settings of a server: vLLM's flags where it has them."""

import dataclasses
import ipaddress
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxserve.config_checks import check_type
from jaxserve.errors import ConfigError

QUEUED_SEQS = 4
"""Sequences that may wait for each place, where nothing is said."""
QUEUED_CONTEXTS = 64
"""Contexts' worth of prompt tokens that may wait, where nothing is said."""

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]

_KINDS = (bool, int, str, float, list, dict)
_TIMES = (
    *("request_timeout", "stall_timeout", "shutdown_timeout", "watchdog_timeout", "chat_template_timeout"),
    *("grpc_keepalive_time", "grpc_keepalive_timeout", "grpc_max_connection_age", "grpc_max_connection_idle"),
)
_MAX_S = 1_000_000
_MAX_COUNT = 2**31 - 1  # gRPC and sockets have 32 bits for numbers, and for milliseconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server listens, whom it lets in, and what it refuses.

    Attributes:
        host: Address that HTTP and gRPC listen on. Others than loopback should have keys and TLS.
        port: Port of the OpenAI-compatible HTTP server; 0 takes a free one, -1 leaves it out.
        grpc_port: Port of the gRPC server; 0 takes a free one, -1 leaves it out.
        admin_host: Address of the admin listener; others than loopback need keys and TLS.
        admin_port: Port of the gRPC admin listener; 0 takes a free one, -1 leaves it out.
        uds: Path of a Unix socket that HTTP listens on in place of host and port.
        served_model_name: Names that requests may use; the first is the one that answers name. None: the model's.
        api_key: A key that lets in for text (scope ``generate``) and metrics; may be repeated. The environment
            variable JAXSERVE_API_KEY adds one.
        auth_file: A YAML or JSON file of keys with names, scopes and limits (see ``jaxserve.server.auth``).
        share_prefix_cache: Share cached pages between the holders of different keys.
        strict: Refuse requests with unknown fields in place of naming them in the answer's header.
        chat_template_content_format: What the chat template sees of contents: ``string`` one text, ``openai`` a list of
            parts, ``auto`` the list if it loops over contents, else the text.
        trust_request_chat_template: Take a chat template from a request.
        default_chat_template_kwargs: Variables for the chat template that requests do not give.
        chat_template_timeout: Seconds that a chat template may take.
        response_role: The role of answers.
        enable_auto_tool_choice: Let the model choose to call tools; needs the engine's ``tool_call_parser``.
        return_tokens_as_token_ids: Write tokens in logprobs as ``token_id:7``.
        enable_prompt_tokens_details: Give the number of cached tokens in usage.
        enable_force_include_usage: Give usage in every stream.
        enable_server_load_tracking: Serve ``GET /load``.
        enable_tokenizer_info_endpoint: Serve ``GET /tokenizer_info``.
        enable_log_requests: Log each request when it comes.
        enable_log_outputs: Log each answer.
        max_log_len: Most characters of a prompt or an answer in the log; None: all.
        enable_request_id_headers: Answer with the header ``X-Request-Id``.
        disable_access_log: Leave out the line of each HTTP request.
        disable_access_log_for_endpoints: Leave it out for these paths, such as ``/health,/metrics``; may be repeated.
        uvicorn_log_level: Least level of the HTTP server's own log.
        root_path: Path that a proxy puts in front.
        insecure: Listen without TLS where other machines can connect: in a network that is safe, or behind a proxy.
        ssl_keyfile: The TLS key of HTTP and gRPC.
        ssl_certfile: Its certificate.
        ssl_ca_certs: Certificates of those who may sign clients'.
        ssl_cert_reqs: 0: clients need no certificate; 1: they may have one; 2: they must.
        enable_ssl_refresh: Read key and certificate again when the files change.
        allowed_origins: Origins of pages that may call the HTTP server (CORS), as a JSON list. None: no other page may,
            unlike in vLLM, whose default is ``["*"]``: all may.
        allowed_methods: Methods that they may use, as a JSON list.
        allowed_headers: Headers that they may send, as a JSON list.
        allow_credentials: Whether they may send cookies.
        max_num_queued_reqs: Most sequences that wait for a place; None: four times ``max_num_seqs``.
        max_num_queued_tokens: Most prompt tokens of sequences that wait; None: 64 times ``max_model_len``.
        max_request_bytes: Longest body of an HTTP request and message of a gRPC one.
        max_prompts: Most prompts of one HTTP request.
        request_timeout: Seconds that a request may take, where it brings no deadline; 0: any time.
        stall_timeout: Seconds that a client may leave an answer unread, or a request incomplete; 0: any time.
        keepalive_timeout: Seconds that an idle HTTP connection stays open.
        grpc_keepalive_time: Seconds between pings on an idle gRPC connection.
        grpc_keepalive_timeout: Seconds to wait for the answer to such a ping.
        grpc_max_connection_age: Seconds after which a gRPC connection takes no more calls, so that clients connect
            again, perhaps elsewhere; calls that run go on. 0: never.
        grpc_max_connection_idle: Seconds that a gRPC connection without calls stays open; 0: as long as it likes.
        max_concurrent_streams: Most calls at a time on one gRPC connection.
        disable_grpc_reflection: Leave out gRPC's server reflection.
        shutdown_timeout: Seconds that running requests may take after SIGTERM.
        watchdog_timeout: Seconds without progress after which the engine process writes down its stacks and ends; 0:
            never.
        restart_engine: Start an engine process again that has ended.
        otlp_traces_endpoint: Where OpenTelemetry traces go; needs the extra ``otel``.
        vllm_metric_names: Give metrics their vLLM names too.
        profile_dir: Folder of profiles; None: profiles cannot be recorded.
        disable_status_page: Leave out the page at ``/``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    admin_host: str = "127.0.0.1"
    admin_port: int = 8002
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
    uvicorn_log_level: LogLevel = "warning"
    root_path: str = ""
    insecure: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    enable_ssl_refresh: bool = False
    allowed_origins: list[str] | None = None
    allowed_methods: list[str] | None = None
    allowed_headers: list[str] | None = None
    allow_credentials: bool = False
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_request_bytes: int = 4 << 20
    max_prompts: int = 1024
    request_timeout: float = 0.0
    stall_timeout: float = 30.0
    keepalive_timeout: int = 5
    grpc_keepalive_time: float = 30.0
    grpc_keepalive_timeout: float = 10.0
    grpc_max_connection_age: float = 0.0
    grpc_max_connection_idle: float = 600.0
    max_concurrent_streams: int = 1024
    disable_grpc_reflection: bool = False
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 300.0
    restart_engine: bool = False
    otlp_traces_endpoint: str | None = None
    vllm_metric_names: bool = False
    profile_dir: str | None = None
    disable_status_page: bool = False

    @classmethod
    def from_arguments(
        cls, arguments: Mapping[str, Any], environment: Mapping[str, str] = MappingProxyType({})
    ) -> "ServerConfig":
        """The settings that were given, and what the environment adds.

        Raises:
            ConfigError: An unknown name, or a value that is wrong.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in arguments:
            if name not in known:
                raise ConfigError(f"the server has no setting {name!r}")
        values = dict(arguments)
        key = environment.get("JAXSERVE_API_KEY")
        if key:
            values["api_key"] = [*(values.get("api_key") or ()), key]
        return cls(**_typed(values, typing.get_type_hints(cls)))

    def __post_init__(self):
        _check_ranges(vars(self))
        _check_files(vars(self))
        _check_paths("disable_access_log_for_endpoints", self.quiet_paths)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile: expected both or neither")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs: asking clients for certificates needs ssl_ca_certs")
        if self.ssl_ca_certs and not (self.ssl_cert_reqs and self.has_tls):
            raise ConfigError("ssl_ca_certs does nothing without ssl_cert_reqs, ssl_keyfile and ssl_certfile")
        if self.enable_ssl_refresh and not self.has_tls:
            raise ConfigError("enable_ssl_refresh needs ssl_keyfile and ssl_certfile")
        if self.port == -1 and self.grpc_port == -1 and self.uds is None:
            raise ConfigError("port and grpc_port: expected at least one that is not -1")
        if not (self.has_tls or self.insecure or is_loopback(self.host)) and (self.port, self.grpc_port) != (-1, -1):
            expected = "expected ssl_keyfile and ssl_certfile, or insecure where something else keeps it safe"
            raise ConfigError(f"host: other machines can reach {self.host}, and nothing is encrypted: {expected}")
        if self.admin_port != -1 and not is_loopback(self.admin_host) and not (self.has_tls and self.has_keys):
            raise ConfigError("admin_host: an admin listener that others can reach needs keys and TLS")

    def check_engine(self, arguments: Mapping[str, Any]) -> None:
        """Refuses an engine that lacks what these settings need.

        Args:
            arguments: The engine's.

        Raises:
            ConfigError: Tools are to be called, and nothing says how the model writes calls.
        """
        if self.enable_auto_tool_choice and arguments.get("tool_call_parser") is None:
            raise ConfigError("enable_auto_tool_choice needs tool_call_parser: give --tool-call-parser too")

    def queued_reqs_limit(self, max_num_seqs: int) -> int:
        """Return the most sequences that may wait, for an engine that runs ``max_num_seqs`` at a time."""
        return self.max_num_queued_reqs or QUEUED_SEQS * max_num_seqs

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths whose requests have no line in the log."""
        given = ",".join(self.disable_access_log_for_endpoints or ()).split(",")
        return frozenset(path.strip() for path in given if path.strip())

    @property
    def has_tls(self) -> bool:
        """Whether HTTP and gRPC are encrypted."""
        return self.ssl_certfile is not None

    @property
    def has_keys(self) -> bool:
        """Whether callers need an API key."""
        return bool(self.api_key) or self.auth_file is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any address
        return False


def queued_tokens_limit(max_num_queued_tokens: int | None, max_model_len: int) -> int:
    """Return the most prompt tokens that may wait, for a context of ``max_model_len`` tokens."""
    return max_num_queued_tokens or QUEUED_CONTEXTS * max_model_len


def _typed(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, each of its field's type; integers are accepted as floats.

    Args:
        values: By name.
        types: Of the fields.

    Raises:
        ConfigError: A value of another type.
    """
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
            raise ConfigError(f"{name}: expected texts that are not empty")
    return checked


def _check_ranges(values: Mapping[str, Any]) -> None:
    """Refuses numbers that mean nothing.

    Raises:
        ConfigError: There is one.
    """
    for name in ("port", "grpc_port", "admin_port"):
        if not -1 <= values[name] <= 65535:
            raise ConfigError(f"{name}: expected a port from 0 to 65535, or -1 for none, got {values[name]}")
    for name in _TIMES:
        if not 0 <= values[name] <= _MAX_S:
            raise ConfigError(f"{name}: expected seconds from 0 to {_MAX_S}, got {values[name]}")
    for name in ("chat_template_timeout", "grpc_keepalive_time", "grpc_keepalive_timeout"):
        if values[name] < 1e-3:
            raise ConfigError(f"{name}: expected seconds from 0.001, got {values[name]}")
    least = {"max_request_bytes": 1024, "max_prompts": 1, "max_concurrent_streams": 1, "keepalive_timeout": 0}
    least |= {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1, "max_log_len": 0}
    for name, low in least.items():
        value = values[name]
        if value is not None and not low <= value <= _MAX_COUNT:
            raise ConfigError(f"{name}: expected a number from {low} to {_MAX_COUNT}, got {value}")
    if values["ssl_cert_reqs"] not in (0, 1, 2):
        raise ConfigError(f"ssl_cert_reqs: expected 0, 1 or 2, got {values['ssl_cert_reqs']}")


def _check_files(values: Mapping[str, Any]) -> None:
    """Refuses names of files that there are not.

    Raises:
        ConfigError: There is one.
    """
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "auth_file"):
        path = values[name]
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: expected a file, got {path!r}, which is none")


def _check_paths(name: str, paths: Iterable[str]) -> None:
    """Refuses what no request's path can be.

    Raises:
        ConfigError: It does not begin with a slash.
    """
    for path in sorted(paths):
        if not path.startswith("/"):
            raise ConfigError(f"{name}: expected paths such as /health, got {path!r}")
