"""What is recorded about each request: log lines, counters and traces. Prompts and completions only on demand."""

import asyncio
import collections
import dataclasses
import json
import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from jaxserve.api.errors import JaxserveError
from jaxserve.api.outputs import RequestMetrics, RequestOutput
from jaxserve.api.request import Request
from jaxserve.log_output import note_log_fields
from jaxserve.server.errors import OUTCOMES, SERVER_FAULTS, status_of
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tracing import (
    LABEL_HEADER,
    make_tracer,
    remembered_headers,
    remembered_trace_id,
    request_attributes,
    time_attributes,
)
from jaxserve.server.usage import KeyUsage

if TYPE_CHECKING:  # the extra "otel" may not be installed
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

# An API may notice a deadline before the engine does, and cancel the request: that counts as the deadline.
_DEADLINE_SLACK_S = 0.05


@dataclasses.dataclass
class RequestCounts:
    """What has happened since the server started.

    Attributes:
        usage: What each caller has used.
        finished: Requests that have ended, by outcome.
        cached_tokens: Prompt tokens of requests with an output that the prefix cache had.
    """

    usage: KeyUsage = dataclasses.field(default_factory=KeyUsage)
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    cached_tokens: int = 0

    @property
    def started(self) -> int:
        """Admitted requests."""
        return self.usage.total.requests

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of requests with an output."""
        return self.usage.total.prompt_tokens

    @property
    def generation_tokens(self) -> int:
        """Tokens of completions."""
        return self.usage.total.generation_tokens

    @property
    def in_flight(self) -> int:
        """Requests that have started and not ended."""
        return self.started - sum(self.finished.values())


def outcome_of(
    error: BaseException | None,
    finish_reasons: Iterable[str],
    *,
    is_finished: bool,
    elapsed_s: float,
    timeout_s: float | None,
) -> str:
    """Return how a request has ended, one of ``OUTCOMES``.

    Args:
        error: What ended it; None if nothing did.
        finish_reasons: Of its completions.
        is_finished: Whether the last output has come: a client that disconnects later changes nothing.
        elapsed_s: Seconds since it started.
        timeout_s: Its limit in seconds; None for no limit.
    """
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    if error is None or (is_cancelled and is_finished):
        return "cancelled" if "abort" in finish_reasons else "ok"
    if not is_cancelled:
        return status_of(error).outcome
    is_late = timeout_s is not None and elapsed_s >= timeout_s - _DEADLINE_SLACK_S
    return "deadline" if is_late else "cancelled"


@dataclasses.dataclass(eq=False)
class RequestEntry:
    """Context manager that counts the tokens of one request, and records it in the log, counters and trace.

    Attributes:
        log: Where to record it.
        caller: Name of the caller.
        request: The request.
        num_waiting_tokens: Tokens of its prompt while they wait, for the ledger.
        num_prompt_tokens: Tokens of its prompt; None before the first output.
        num_cached_tokens: Those of them that the prefix cache had.
        num_generated: Tokens of each completion, by its index.
    """

    log: "RequestLog"
    caller: str
    request: Request
    num_waiting_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_generated: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter[int])
    _begin_s: float = dataclasses.field(default_factory=time.monotonic)
    _first_token_s: float | None = None
    _reasons: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    _texts: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    _last: RequestOutput | None = None
    _span: "Span | None" = None

    @property
    def num_seqs(self) -> int:
        """Its sequences, for the ledger."""
        return self.request.params.n if self.request.pooling is None else 1

    def __enter__(self) -> "RequestEntry":
        log, request = self.log, self.request
        if log.tracer is not None:
            attributes = request_attributes(request, log.model)
            self._span = log.tracer.start(attributes, remembered_headers())
        trace_id = remembered_trace_id() if self._span is None else f"{self._span.get_span_context().trace_id:032x}"
        note_log_fields(request_id=request.request_id or None, trace_id=trace_id)
        if log.config.enable_log_requests:
            label, limit = remembered_headers().get(LABEL_HEADER), log.config.max_log_len
            if request.token_ids is not None:
                ids = _shortened(str(list(request.token_ids[:limit])), limit)
                prompt = f"of {len(request.token_ids)} tokens {ids}"
            elif request.text is not None:
                prompt = _shortened(request.text, limit)
            else:
                prompt = _shortened(json.dumps(request.chat, ensure_ascii=False, default=str), limit)
            shown = "" if label is None else f" ({label!r})"
            name, caller, params = self.request.request_id, self.caller, request.params
            logger.info("Request %s%s of %s: prompt %s, params: %r", name, shown, caller, prompt, params)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        elapsed_s = time.monotonic() - self._begin_s
        is_finished = self._last is not None and self._last.finished
        outcome = outcome_of(
            error, reasons, is_finished=is_finished, elapsed_s=elapsed_s, timeout_s=self.request.timeout_s
        )
        self.log.counts.finished[outcome] += 1
        if outcome in SERVER_FAULTS:
            bug = None if error is None or isinstance(error, JaxserveError) else error
            logger.warning("Request %s of %s failed: %r", self.request.request_id, self.caller, error, exc_info=bug)
        if self.log.config.enable_log_requests or self.log.config.enable_log_outputs:
            self._log_end(outcome, reasons, elapsed_s)
        if self.log.tracer is not None and self._span is not None:
            attributes = {
                "gen_ai.usage.prompt_tokens": self.num_prompt_tokens or 0,
                "gen_ai.usage.completion_tokens": self.num_generated.total(),
                "gen_ai.response.finish_reasons": reasons,
                "jaxserve.outcome": outcome,
                **({} if self._times is None else time_attributes(self._times)),
            }
            reason = type(error).__name__ if error is not None else outcome
            self.log.tracer.end(self._span, attributes, reason if outcome in (*SERVER_FAULTS, "deadline") else None)

    @property
    def _times(self) -> RequestMetrics | None:
        return None if self._last is None else self._last.metrics

    def add(self, output: RequestOutput) -> None:
        """Record an output: a delta, or the only output."""
        self._last, num_prompt = output, 0
        if self.num_prompt_tokens is None:
            self.num_prompt_tokens = num_prompt = len(output.prompt_token_ids)
            self.num_cached_tokens = output.num_cached_tokens or 0
            self.log.counts.cached_tokens += self.num_cached_tokens
        num_new = sum(len(completion.token_ids) for completion in output.outputs)
        self.log.usage.add_tokens(self.caller, num_prompt, num_new)
        if num_new and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        for completion in output.outputs:
            index = completion.index
            self.num_generated[index] += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[index] = completion.finish_reason
            if self.log.config.enable_log_outputs:
                self._texts[index] = _extended(self._texts.get(index, ""), completion.text, self.log.config.max_log_len)

    def _log_end(self, outcome: str, reasons: list[str], elapsed_s: float) -> None:
        parts = [
            f"{self.num_prompt_tokens or 0} prompt tokens ({self.num_cached_tokens} cached)",
            f"{self.num_generated.total()} generated",
            f"finish reasons {reasons}",
            f"{elapsed_s:.3f} s",
        ]
        first_s = None if self._first_token_s is None else self._first_token_s - self._begin_s
        if self._times is not None and self._times.first_token_latency:
            first_s = self._times.first_token_latency  # of a request with one output only the engine knows it
        if first_s is not None:
            parts.append(f"first token after {first_s:.3f} s")
        if self.log.config.enable_log_outputs:
            limit = self.log.config.max_log_len
            parts += [f"text {index}: {_shortened(self._texts[index], limit)}" for index in sorted(self._texts)]
        logger.info("Request %s of %s ended: %s, %s", self.request.request_id, self.caller, outcome, ", ".join(parts))


class RequestLog:
    """Follows requests.

    Attributes:
        counts: What has happened since the server started.
        usage: What each caller has used.

    Args:
        config: What to record.
        model: Name of the model in traces if ``config`` has none.

    Raises:
        ConfigError: Tracing is on and cannot work.
    """

    def __init__(self, config: ServerConfig, model: str | None = None):
        self.config = config
        self.usage = KeyUsage()
        self.counts = RequestCounts(self.usage)
        self.model = config.served_model_name[0] if config.served_model_name else model
        self.tracer = make_tracer(config)

    def close(self) -> None:
        """Send the remaining spans before the process ends; may block for some seconds."""
        if self.tracer is not None:
            self.tracer.close()


def _extended(text: str, more: str, limit: int | None) -> str:
    """Return a text with more, unless it is longer than is shown."""
    return text + more if limit is None or len(text) <= limit else text


def _shortened(text: str, limit: int | None) -> str:
    """Return a text on one line, in quotes."""
    return repr(text) if limit is None or len(text) <= limit else f"{text[:limit]!r}…"
