"""What is noted of each request: log lines, counters and traces. Prompts and texts stay out of it unless asked for."""

import collections
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from jaxserve.errors import JaxserveError
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.outcomes import OUTCOMES, SERVERS_FAULT, outcome_of
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tracing import (
    LABEL_HEADER,
    AttributeValue,
    make_tracer,
    remembered_headers,
    request_attributes,
    time_attributes,
)

if TYPE_CHECKING:  # the extra "otel" may not be installed
    from jaxserve.server.otel_spans import OtelSpan

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RequestCounts:
    """What has happened since the server started.

    Attributes:
        started: Requests that were admitted.
        finished: Outcome -> requests that ended so.
        prompt_tokens: Of prompts that the engine answered.
        cached_tokens: Those of them that the prefix cache had.
        generation_tokens: Of texts that were handed on.
    """

    started: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0

    @property
    def in_flight(self) -> int:
        """Requests that have started and not ended."""
        return self.started - sum(self.finished.values())


class RequestEntry:
    """Follows one request: a context manager around all that is done for it.

    Args:
        log: Where to note what happens.
        caller: Who asked.
        request_id: The server's name for it.
        request: What was asked.
    """

    def __init__(self, log: "RequestLog", caller: str, request_id: str, request: EngineRequest):
        self._log = log
        self._caller = caller
        self._request_id = request_id
        self._request = request
        self._begin_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_prompt_tokens: int | None = None
        self._num_cached_tokens = self._num_generation_tokens = 0
        self._reasons: dict[int, str] = {}
        self._texts: collections.defaultdict[int, str] = collections.defaultdict(str)
        self._is_finished = False
        self._times: RequestMetrics | None = None
        self._span: OtelSpan | None = None

    def __enter__(self) -> "RequestEntry":
        self._log.counts.started += 1
        self._span = self._log.start_span(self._request_id, self._request)
        if self._log.config.enable_log_requests:
            label = remembered_headers().get(LABEL_HEADER)
            logger.info(
                "Request %s%s of %s: prompt %s, params: %r",
                self._request_id,
                "" if label is None else f" ({label!r})",
                self._caller,
                self._shown_prompt(),
                self._request.params,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        outcome = outcome_of(
            error,
            self._reasons.values(),
            is_finished=self._is_finished,
            elapsed_s=self._elapsed_s(),
            timeout_s=self._request.timeout_s,
        )
        self._log.counts.finished[outcome] += 1
        if outcome in SERVERS_FAULT:
            # What nobody foresaw is shown in full.
            shown = None if error is None or isinstance(error, JaxserveError) else error
            logger.warning("Request %s of %s failed: %r", self._request_id, self._caller, error, exc_info=shown)
        if self._log.config.enable_log_requests or self._log.config.enable_log_outputs:
            self._log_end(outcome)
        if self._span is not None:
            reason = type(error).__name__ if error is not None else outcome
            self._span.end(self._end_attributes(outcome), reason if outcome in (*SERVERS_FAULT, "deadline") else None)

    def note(self, output: RequestOutput) -> None:
        """Takes in what came of it: deltas, or one output at the end."""
        self.note_prompt(len(output.prompt_token_ids), output.num_cached_tokens or 0)
        keeps_texts = self._log.config.enable_log_outputs
        limit = self._log.config.max_log_len
        num_tokens = 0
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason
            if keeps_texts and (limit is None or len(self._texts[completion.index]) <= limit):
                self._texts[completion.index] += completion.text
        if num_tokens and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._num_generation_tokens += num_tokens
        self._log.counts.generation_tokens += num_tokens
        self._is_finished = self._is_finished or output.finished
        if output.metrics is not None:
            self._times = output.metrics

    def note_prompt(self, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """Takes in how long the prompt is; all but the first call are without effect."""
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens, self._num_cached_tokens = num_tokens, num_cached_tokens
            self._log.counts.prompt_tokens += num_tokens
            self._log.counts.cached_tokens += num_cached_tokens

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _shown_prompt(self) -> str:
        request = self._request
        if request.token_ids is not None:
            limit = self._log.config.max_log_len
            return f"of {len(request.token_ids)} tokens {_shortened(str(list(request.token_ids[:limit])), limit)}"
        text = json.dumps(request.chat, ensure_ascii=False, default=str) if request.text is None else request.text
        return _shortened(text, self._log.config.max_log_len)

    def _log_end(self, outcome: str) -> None:
        parts = [
            f"{self._num_prompt_tokens or 0} prompt tokens ({self._num_cached_tokens} cached)",
            f"{self._num_generation_tokens} generated",
            f"finish reasons {[self._reasons[index] for index in sorted(self._reasons)]}",
            f"{self._elapsed_s():.3f} s",
        ]
        first_s = None if self._first_token_s is None else self._first_token_s - self._begin_s
        if self._times is not None:
            # Where all comes in one output, the engine alone knows.
            first_s = self._times.time_to_first_token_s
        if first_s is not None:
            parts.append(f"first token after {first_s:.3f} s")
        if self._log.config.enable_log_outputs:
            limit = self._log.config.max_log_len
            parts += [f"text {index}: {_shortened(self._texts[index], limit)}" for index in sorted(self._texts)]
        logger.info("Request %s of %s ended: %s, %s", self._request_id, self._caller, outcome, ", ".join(parts))

    def _end_attributes(self, outcome: str) -> Mapping[str, AttributeValue]:
        return {
            "gen_ai.usage.prompt_tokens": self._num_prompt_tokens or 0,
            "gen_ai.usage.completion_tokens": self._num_generation_tokens,
            "gen_ai.response.finish_reasons": [self._reasons[index] for index in sorted(self._reasons)],
            "jaxserve.outcome": outcome,
            **({} if self._times is None else time_attributes(self._times)),
        }


class RequestLog:
    """Follows requests.

    Args:
        config: What to note.
        model: Name of the model in traces where ``config`` has none.

    Raises:
        ConfigError: Traces are asked for and cannot be had.
    """

    def __init__(self, config: ServerConfig, model: str | None = None):
        self.config = config
        self.counts = RequestCounts()
        self._model = config.served_model_name[0] if config.served_model_name else model
        self._tracer = make_tracer(config)

    def follow(self, caller: str, request_id: str, request: EngineRequest) -> RequestEntry:
        """Notes a request's begin, what comes, and its end, an error too: use it in a ``with`` statement."""
        return RequestEntry(self, caller, request_id, request)

    def start_span(self, request_id: str, request: EngineRequest) -> "OtelSpan | None":
        """Begins a request's span; None where nothing is traced."""
        if self._tracer is None:
            return None
        return self._tracer.start(request_attributes(request_id, request, self._model), remembered_headers())


def _shortened(text: str, limit: int | None) -> str:
    """A text on one line, in quotes."""
    return repr(text) if limit is None or len(text) <= limit else f"{text[:limit]!r}…"
