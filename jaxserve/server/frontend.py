"""What the HTTP and gRPC APIs share: the engine, the ledger, API keys, and the log of requests."""

import contextlib
import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from typing import Any

from jaxserve.api.errors import EngineDeadError, JaxserveError, RequestFailedError
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.request import Request, check_length
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.text_bound import check_text
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.byte_budget import budget_bytes, output_bytes
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_groups import EngineGroups
from jaxserve.server.errors import UnavailableError, UnknownModelError
from jaxserve.server.ledger import Ledger
from jaxserve.server.long_work import LongWork
from jaxserve.server.poison import PoisonList
from jaxserve.server.request_log import RequestEntry, RequestLog
from jaxserve.server.settings import ServerConfig, queued_tokens_limit
from jaxserve.server.wire import EngineInfo

logger = logging.getLogger(__name__)


class Frontend:
    """The state that all APIs of a server share.

    Args:
        config: The server's settings.
        engine: The engine's client.
        model: Directory or hub id of the model: its name unless ``served_model_name`` is set.

    Attributes:
        ledger: Counts and limits the requests in flight; accepts none before ``open``.
        authenticator: Checks API keys.
        log: Writes log lines, counters and traces of requests.
        long_work: Threads for what would hold up the event loop.
        has_started: Whether the engine has been ready once.
        is_draining: Whether load balancers should send no more requests.
        is_lost: Whether the engine has ended and is not started again.

    Raises:
        ConfigError: The keys are wrong, or traces cannot be sent.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient | EngineGroups, model: str):
        self.config = config
        self.engine = engine
        self.ledger = Ledger(budget_bytes(config))
        self.authenticator = Authenticator(config)
        self.log = RequestLog(config, model)
        self.long_work = LongWork(self.ledger.has_others)
        self.model_names = tuple(config.served_model_name or (model,))
        self.created_s = int(time.time())
        self._begin_s = time.monotonic()
        self.has_started = False
        self.is_draining = False
        self.is_lost = False
        self._running: dict[RequestEntry, None] = {}
        self._poison = PoisonList()

    @property
    def uptime_s(self) -> float:
        """Seconds since the front end started."""
        return time.monotonic() - self._begin_s

    @property
    def info(self) -> EngineInfo:
        """What runs.

        Raises:
            UnavailableError: The engine is not ready, or has ended.
        """
        return self.engine.info

    def open(self) -> None:
        """Accept requests, as many as the engine has room for and the settings let wait."""
        model, config = self.info.model, self.config
        self.has_started = True
        limit_mib = self.ledger.memory.limit_bytes >> 20
        logger.info("requests in flight may take %d MiB of host memory (max_admitted_bytes)", limit_mib)
        self.ledger.open(
            model.max_num_seqs + config.queued_reqs_limit(model.max_num_seqs),
            max_num_seqs=model.max_num_seqs,
            max_num_queued_tokens=queued_tokens_limit(config.max_num_queued_tokens, model.max_model_len),
        )

    def reopen(self) -> None:
        """Let as many requests run as the engine now has room for, if any are accepted."""
        if self.ledger.is_open:
            self.open()

    def check_ready(self) -> None:
        """Check that load balancers should send requests.

        Raises:
            UnavailableError: The server starts, drains or has no engine.
        """
        self.ledger.check_open()
        _ = self.info
        if self.is_draining:
            raise UnavailableError("the server is shutting down")

    def check_model(self, name: str | None) -> str:
        """Return the model name of a response to a request for the model ``name``; None: the first name.

        Raises:
            UnknownModelError: The server has no model of that name.
        """
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise UnknownModelError(f"The model `{name}` does not exist.")
        return name

    def entry(self, caller: Caller, request: Request) -> RequestEntry:
        """Return the entry of a request, which gets a salt that other tenants cannot guess, and the default deadline.

        Token ids that the context cannot hold, and texts that are certainly too long, are not even sent to the engine
        process.

        Raises:
            RequestError: The prompt is too long.
            OverloadedError: The caller has used its tokens of the last minute.
            RequestFailedError: The same request was running at two ends of the engine process.
        """
        if caller.tokens_per_minute is not None:
            self.log.usage.check_rate(caller)
        changes: dict[str, Any] = {"turn": caller.turn}
        if caller.min_priority is not None and request.priority < caller.min_priority:
            changes["priority"] = caller.min_priority
        if caller.tenant is not None:
            own = hashlib.sha256(f"{caller.tenant}\0{request.cache_salt or ''}".encode()).hexdigest()
            changes["cache_salt"] = own
        if request.timeout_s is None and self.config.request_timeout:
            changes["timeout_s"] = self.config.request_timeout
        if request.token_ids is not None and len(request.token_ids) > self.info.max_model_len:
            if request.truncate_prompt_tokens is None:
                check_length(len(request.token_ids), 1, self.info.max_model_len)
            changes["token_ids"] = request.token_ids[-self.info.max_model_len :]
        check_text(self.info.text_bound, request, self.info.max_model_len)
        request = dataclasses.replace(request, **changes)
        self._poison.check(caller.name, request)
        return RequestEntry(self.log, caller.name, request)

    def end_callers(self, names: Collection[str], error: JaxserveError) -> int:
        """End the requests in flight of callers with an error; return their number."""
        found = [entry for entry in self._running if entry.caller in names]
        self.engine.end_named([entry.request.request_id for entry in found], error)
        return len(found)

    @contextlib.contextmanager
    def _following(self, entry: RequestEntry) -> Iterator[None]:
        """Know of a request in flight, and remember it if the engine process ends while it runs, as far as the front
        end knows."""
        self._running[entry] = None
        try:
            yield
        except EngineDeadError:
            if not self.ledger.is_waiting(entry):
                self._poison.note_death(entry.caller, entry.request)
            raise
        finally:
            del self._running[entry]

    async def generate(self, entry: RequestEntry) -> AsyncGenerator[RequestOutput, None]:
        """Run an admitted request as ``EngineClient.generate``; its entry is in the ledger meanwhile."""
        request = entry.request
        self.log.usage.add_request(entry.caller)
        with entry, self.ledger.entered(entry) as is_waiting, self._following(entry):
            if is_waiting and request.token_ids is not None:
                self.ledger.note_prompt(entry, len(request.token_ids))
                is_waiting = False
            async with contextlib.aclosing(self.engine.generate(request, is_waiting=is_waiting)) as outputs:
                async for output in outputs:
                    if not (output.outputs or output.finished):
                        self.ledger.note_prompt(entry, len(output.prompt_token_ids))
                        continue
                    entry.add(output)
                    if any(one.finish_reason == "error" for one in output.outputs):
                        raise RequestFailedError(output.error or "the engine failed at this request")
                    with self.ledger.memory.held(entry.caller, output_bytes(output)):
                        yield output


def new_request_id(prefix: str) -> str:
    """Return a new request id such as ``cmpl-…``; clients can neither guess nor choose it."""
    return f"{prefix}-{secrets.token_hex(16)}"


def sampling_params(info: EngineInfo, given: Mapping[str, Any], *, is_chat: bool = False) -> SamplingParams:
    """Build and check the parameters of a request, whichever API it came through.

    A field that is None counts as not given and has the model's default. ``max_tokens`` else has vLLM's default: all
    that the context holds for a conversation, 16 for other prompts; at most ``max_output_tokens``.

    Raises:
        RequestError: An unknown field, or a wrong value.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if is_chat and "max_tokens" not in info.default_fields:
        values.setdefault("max_tokens", None)
    params = SamplingParams.from_optional(**{**info.default_fields, **values})
    limit = info.max_output_tokens
    if limit is not None and (params.max_tokens is None or params.max_tokens > limit):
        return params.clone(max_tokens=limit)
    return params
