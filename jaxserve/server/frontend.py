"""What both surfaces share: whom they let in, how much, and what is noted of each request."""

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from jaxserve.errors import RequestError, RequestFailedError
from jaxserve.outputs import RequestOutput
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.engine_client import EngineClient, EngineInfo
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.errors import UnknownModelError
from jaxserve.server.request_limits import RequestLimits
from jaxserve.server.request_log import RequestLog
from jaxserve.server.settings import ServerConfig


@dataclasses.dataclass(frozen=True)
class ParserNames:
    """How the model writes what is not content: names of formats in ``jaxserve.parsers``, None where there is none.

    Attributes:
        reasoning: The engine's ``reasoning_parser``.
        tools: The engine's ``tool_call_parser``.
    """

    reasoning: str | None = None
    tools: str | None = None


class Frontend:
    """The state of a front end: one for all surfaces of a server.

    Args:
        config: The server's settings.
        engine: The engine behind it.
        limits: Limits the requests in flight.
        authenticator: Knows the callers.
        log: Notes requests: log lines, counters, traces.
        model: Directory or hub id of the model: its name where none is given.
        parsers: How the model writes reasoning and tool calls.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        limits: RequestLimits,
        authenticator: Authenticator,
        log: RequestLog,
        model: str,
        parsers: ParserNames = ParserNames(),  # noqa: B008 (frozen)
    ):
        self.config = config
        self.engine = engine
        self.limits = limits
        self.authenticator = authenticator
        self.log = log
        self.parsers = parsers
        self.model_names = tuple(config.served_model_name or (model,))
        self.created_s = int(time.time())

    @property
    def info(self) -> EngineInfo:
        """What runs behind it.

        Raises:
            UnavailableError: Nothing does yet, or any more.
        """
        return self.engine.info

    def check_model(self, name: str | None) -> str:
        """The name to answer with for a request that names a model, or none.

        Raises:
            UnknownModelError: There is no model of that name.
        """
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise UnknownModelError(f"The model `{name}` does not exist.")
        return name

    @contextlib.contextmanager
    def admit(self, caller: Caller, num_texts: int = 1) -> Iterator[None]:
        """Lets a request in that asks for so many texts, and holds its place while the block runs.

        Raises:
            UnavailableError: The server takes no requests.
            OverloadedError: There are too many.
        """
        with self.limits.admit(caller, num_texts):
            yield

    async def generate(
        self, caller: Caller, request: EngineRequest, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request that was admitted; as ``Engine.generate``, and noted in log, counters and trace."""
        request = self._with_own_salt(caller, request)
        with self.log.follow(caller.name, request_id, request) as entry:
            outputs = self.engine.generate(request, request_id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    entry.note(output)
                    if any(one.finish_reason == "error" for one in output.outputs):
                        raise RequestFailedError(output.error or "the engine failed at this request")
                    yield output

    async def embed(self, caller: Caller, request: EngineRequest, request_id: str) -> tuple[list[float], int]:
        """The pooled vector of a prompt and its number of tokens."""
        request = self._with_own_salt(caller, request)
        with self.log.follow(caller.name, request_id, request) as entry:
            vector, num_tokens = await self.engine.embed(request, request_id)
            entry.note_prompt(num_tokens)
            return vector, num_tokens

    def _with_own_salt(self, caller: Caller, request: EngineRequest) -> EngineRequest:
        """The request with a salt that callers of other tenants cannot make, and with the server's own deadline.

        Raises:
            RequestError: The request's own salt is empty.
        """
        if request.cache_salt == "":
            raise RequestError("cache_salt must not be empty", parameter="cache_salt", value="")
        changes: dict[str, Any] = {}
        if caller.tenant is not None:
            own = hashlib.sha256(f"{caller.tenant}\0{request.cache_salt or ''}".encode()).hexdigest()
            changes["cache_salt"] = own
        if request.timeout_s is None and self.config.request_timeout:
            changes["timeout_s"] = self.config.request_timeout
        return dataclasses.replace(request, **changes) if changes else request


def new_request_id(prefix: str) -> str:
    """A name for a request, such as ``cmpl-…``: made here alone, so that nobody can guess or choose another's."""
    return f"{prefix}-{secrets.token_hex(16)}"
