"""Load-test backend for OpenAI's HTTP API and its event streams."""

import codecs
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.records import BenchRequest, BenchResponse, BenchServeError


class EventReader:
    """Splits a stream of server-sent events, however the network divided it.

    As their standard says, lines end with ``\\n``, ``\\r\\n`` or ``\\r``, and a byte order mark is no text.
    """

    def __init__(self):
        self._rest = b""
        self._is_first = True
        self._ends_with_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that this piece completes."""
        if data and (self._ends_with_return or b"\r" in data):
            if self._ends_with_return:
                data = data.removeprefix(b"\n")  # of a line end that was divided
            self._ends_with_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._rest += data
        if self._is_first and len(self._rest) >= len(codecs.BOM_UTF8):
            self._rest, self._is_first = self._rest.removeprefix(codecs.BOM_UTF8), False
        *events, self._rest = self._rest.split(b"\n\n")
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found


@dataclasses.dataclass
class StreamNotes:
    """Records the events of a stream in a response. Each event with a choice is a chunk, as in vLLM."""

    response: BenchResponse
    events: EventReader = dataclasses.field(default_factory=EventReader)
    has_ended: bool = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Read a piece of the stream.

        Raises:
            BenchServeError: An event is malformed, or reports an error.
        """
        for event in self.events.feed(data):
            if event == b"[DONE]":
                self.has_ended = True
            else:
                self._note(event, now_s)

    def _note(self, event: bytes, now_s: float) -> None:
        try:
            fields = json.loads(event)
            choices, usage = fields.get("choices"), fields.get("usage")
        except (ValueError, AttributeError) as error:
            raise BenchServeError(f"expected an event with a JSON object, got {event[:200]!r}") from error
        if "error" in fields:
            raise BenchServeError(f"the stream ended with an error: {error_text(fields)}")
        response = self.response
        if choices:
            response.chunk_s.append(now_s)
            response.texts.append(_text(choices[0]))
        if usage:
            response.num_output_tokens = usage.get("completion_tokens", response.num_output_tokens)
            response.num_prompt_tokens = usage.get("prompt_tokens", response.num_prompt_tokens)


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a completion's or a chat's choice, including reasoning."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")


def error_text(fields: Any) -> str:
    """Return the message of an error object, in any of the usual forms."""
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    return str(error.get("message", error) if isinstance(error, dict) else error)


class OpenAIBackend:
    """Sends prompts as completions or as chats of one user message.

    Args:
        client: Connections to the server.
        endpoint: Path, such as ``/v1/completions``; one that ends in ``chat/completions`` receives chats.
        model: Name of the model.
        fields: Further fields of each request.
        clock: Returns the time; must be the clock of ``client``.

    Raises:
        BenchServeError: The path does not end in completions.
    """

    def __init__(
        self,
        client: HttpClient,
        endpoint: str,
        model: str,
        fields: dict[str, Any],
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not endpoint.endswith("completions"):
            raise BenchServeError(f"endpoint: expected a path that ends in completions, got {endpoint!r}")
        self._client = client
        self._endpoint = endpoint
        self._is_chat = endpoint.endswith("chat/completions")
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._clock = clock

    async def send(self, request: BenchRequest) -> BenchResponse:
        """Send a request and wait for the whole response. A failure is recorded in it, never raised."""
        body = self._body(request)
        response = BenchResponse(self._clock(), request.num_prompt_tokens)
        notes = StreamNotes(response)
        try:
            found = await self._client.request("POST", self._endpoint, body, notes.feed)
        except (OSError, BenchServeError) as error:
            response.error = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
            return response
        if found.status != 200:
            response.error = f"HTTP {found.status}: {_error_of(found.body)}"
        elif not response.chunk_s:
            response.error = "the stream ended without a chunk of text"
        elif not notes.has_ended:
            response.error = "the stream ended without [DONE]"
        return response

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        if self._is_chat:
            messages = [{"role": "user", "content": request.prompt}]
            return {"messages": messages, "max_completion_tokens": request.max_tokens, **self._fields}
        return {"prompt": request.prompt, "max_tokens": request.max_tokens, **self._fields}


def _error_of(body: bytes) -> str:
    try:
        return error_text(json.loads(body))[:500]
    except ValueError:
        return body[:500].decode("utf-8", "replace")
