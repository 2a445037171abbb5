"""An engine that is none and a caller that is none, for tests of the HTTP surface."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jaxserve.api.draft_metrics import DraftReport
from jaxserve.api.errors import RequestError
from jaxserve.api.logprobs import Logprob
from jaxserve.api.metric_types import Metric
from jaxserve.api.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_params import check_against
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.parsers import ParserNames
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.frontend import Frontend, sampling_params
from jaxserve.server.http_api.app import make_app
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo

MODEL = model_pb2.Model(root="models/tiny", max_model_len=100, architecture="Fake", vocab_size=1000, max_num_seqs=8)
CHAT = [{"role": "user", "content": "Hi"}]


class FakeEngine(EngineClient):
    """Answers with written pieces. A token is a character, its id the character's number.

    Attributes:
        texts: Pieces of each sample; the last one stands for all beyond it.
        rendered: The prompt that every conversation becomes.
        error: Raised once ``error_at`` outputs were given.
        stall_at: Outputs after which nothing more comes.
        fails_on: Texts of prompts that fail.
        requests: What came, by name.
        ended: Names of requests whose generator has ended, in whatever way.
        draft_report: Whether and how completions report drafts: of three, three and one token.
        cancelled: Names of those that were closed or cancelled before their last output.
        is_dead: Whether ``info`` raises.
    """

    def __init__(self, *texts: Sequence[str], rendered: str = "user: Hi\nassistant:", stop: str | int | None = None):
        self.texts = texts or (["Hel", "lo"],)
        self.rendered = rendered
        self.stop_at = stop
        self.error: Exception | None = None
        self.error_at = 0
        self.stall_at: int | None = None
        self.fails_on: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.dead: Exception | None = None
        self.draft_report: DraftReport | None = None
        self.default_fields: dict[str, Any] = {}
        self.parsers = ParserNames()
        self.vector = [0.5, -0.25]
        self.num_cached = 1

    @property
    def info(self) -> EngineInfo:
        """What runs."""
        if self.dead is not None:
            raise self.dead
        return EngineInfo(model=MODEL, default_fields=self.default_fields, parsers=self.parsers)

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Outputs until the request ends."""
        check_against(request.params, vocab_size=MODEL.vocab_size, max_logprobs=-1)
        self._check_vocabulary(request.token_ids or (), "prompt")
        json.dumps(request.chat).encode()
        self.requests[request.request_id] = request
        is_done = False
        try:
            prompt, ids = self._prompt(request)
            if prompt in self.fails_on:
                raise RequestError("this prompt fails", parameter="prompt" if request.pooling is None else "input")
            for number, output in enumerate(self._outputs(request, prompt, ids)):
                if self.error is not None and number == self.error_at:
                    is_done = True
                    raise self.error
                if number == self.stall_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                is_done = output.finished
                yield output
        except RequestError:
            is_done = True
            raise
        finally:
            self.ended.append(request.request_id)
            if not is_done:
                self.cancelled.append(request.request_id)

    @staticmethod
    def _check_vocabulary(token_ids: Sequence[int], parameter: str) -> None:
        outside = max(token_ids, default=0)
        if outside >= MODEL.vocab_size:
            raise RequestError(f"token id {outside} is out of vocabulary", parameter=parameter)

    def _prompt(self, request: Request) -> tuple[str | None, list[int]]:
        if request.token_ids is not None:
            return None, list(request.token_ids)
        text = self.rendered if request.chat is not None else request.text
        assert text is not None
        return text, [ord(character) % 1000 for character in text]

    def _outputs(self, request: Request, prompt: str | None, ids: list[int]) -> list[RequestOutput]:
        params = request.params
        samples = [self._pieces(index, params.max_tokens) for index in range(params.n)]
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            samples = [[self._whole(pieces)] for pieces in samples]
        found: list[RequestOutput] = []
        length = max(map(len, samples))
        for step in range(length):
            outputs = [
                self._completion(request, index, *pieces[step])
                for index, pieces in enumerate(samples)
                if step < len(pieces)
            ]
            wanted = params.prompt_logprobs
            found.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=prompt,
                    prompt_token_ids=ids,
                    outputs=outputs,
                    finished=step == length - 1,
                    num_cached_tokens=self.num_cached,
                    prompt_logprobs=None
                    if wanted is None or step
                    else [None, *(self._position(token, wanted, request) for token in ids[1:])],
                    metrics=RequestMetrics() if step == length - 1 else None,
                    embedding=None if request.pooling is None or step < length - 1 else self.vector,
                )
            )
        return found

    def _pieces(self, index: int, max_tokens: int | None) -> list[tuple[str, FinishReason | None]]:
        left, found = 10**9 if max_tokens is None else max_tokens, list[tuple[str, FinishReason | None]]()
        pieces = self.texts[min(index, len(self.texts) - 1)]
        for place, piece in enumerate(pieces):
            taken, left = piece[:left], left - len(piece)
            is_last = place == len(pieces) - 1
            reason: FinishReason | None = "length" if left < 0 or (left == 0 and not is_last) else None
            found.append((taken, reason or ("stop" if is_last else None)))
            if reason is not None:
                break
        return found

    @staticmethod
    def _whole(pieces: list[tuple[str, FinishReason | None]]) -> tuple[str, FinishReason | None]:
        return "".join(text for text, _ in pieces), pieces[-1][1]

    def _completion(self, request: Request, index: int, text: str, reason: FinishReason | None) -> CompletionOutput:
        report = self.draft_report
        ids, count = [ord(character) % 1000 for character in text], request.params.num_logprobs
        return CompletionOutput(
            index=index,
            text=text if request.params.detokenize else "",
            token_ids=ids,
            cumulative_logprob=None if count is None else -1.0,
            logprobs=None if count is None else [self._position(token, count, request) for token in ids],
            finish_reason=reason,
            stop_reason=self.stop_at if reason == "stop" else None,
            spec_decode_metrics=None if reason is None or report is None else report.of([3, 3, 1], [2, 0, 1]),
        )

    @staticmethod
    def _position(token: int, count: int, request: Request) -> dict[int, Logprob]:
        """The token, of rank 2 behind one that is called '!', and others of no likelihood at all."""
        others = {33: Logprob(-0.25, 1, "!"), 90: Logprob(float("-inf"), 3, "Z"), 91: Logprob(float("nan"), 4, "[")}
        found = {token: Logprob(-1.5, 2, chr(token))}
        for other in [*others][:count]:
            found.setdefault(other, others[other])
        if request.params.detokenize:
            return found
        return {token: Logprob(entry.logprob, entry.rank) for token, entry in found.items()}

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False, turn: Turn = SHARED_TURN
    ) -> tuple[list[int], list[str]]:
        """A token a character, and one with number 1 in front."""
        begin = [1] if add_special_tokens else []
        strings = [*(["<s>"] if add_special_tokens else []), *text] if with_strings else []
        return [*begin, *map(ord, text)], strings

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, turn: Turn = SHARED_TURN
    ) -> str:
        """The characters."""
        self._check_vocabulary(token_ids, "tokens")
        return "".join(map(chr, token_ids))

    async def render_chat(self, chat: Mapping[str, Any], turn: Turn = SHARED_TURN) -> tuple[str, list[int]]:
        """The prompt of every conversation."""
        self.requests["render"] = Request(chat=chat, params=sampling_params(self.info, {}))
        return self.rendered, [ord(character) for character in self.rendered]

    async def tokenizer_info(self) -> dict[str, Any]:
        """A class and a template."""
        return {"tokenizer_class": "Fake", "chat_template": "{{ messages }}"}

    async def metrics(self) -> list[Metric]:
        """None."""
        return []

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Nothing."""
        return []

    async def reset_prefix_cache(self) -> None:
        """Nothing."""

    async def start_profile(self, directory: str) -> None:
        """Nothing."""

    async def stop_profile(self) -> None:
        """Nothing."""

    @property
    def request(self) -> Request:
        """The newest request."""
        return [*self.requests.values()][-1]


def make_server(
    engine: FakeEngine | None = None, *, parsers: ParserNames | None = None, limit: int = 4000, **settings: Any
) -> "Server":
    """An open server over an engine."""
    engine = engine or FakeEngine()
    engine.parsers = parsers or ParserNames()
    frontend = Frontend(ServerConfig(**{"allowed_hosts": ["*"], **settings}), engine, "tiny")
    frontend.ledger.open(limit)
    frontend.has_started = True
    return Server(frontend, engine)


@dataclasses.dataclass
class Answer:
    """What an application sent."""

    messages: list[Any]

    @property
    def status(self) -> int:
        """The status code."""
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name."""
        return {name.decode().lower(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def json(self) -> Any:
        """The body, strictly."""
        return json.loads(self.body, parse_constant=lambda name: pytest_fail(f"{name} in an answer"))

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        assert set(self.json()) == {"error"}
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events, without ``[DONE]``, which must be the last."""
        assert self.headers["content-type"].startswith("text/event-stream")
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def pytest_fail(message: str) -> Any:
    """Fails."""
    raise AssertionError(message)


class Connection:
    """One request's way in and out of an application, driven by a test.

    Attributes:
        sent: What the application sent.
        is_blocked: While True, ``send`` waits.
    """

    def __init__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]):
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 8000),
        }
        self.sent: list[Any] = []
        self.is_gone = asyncio.Event()
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self.news = asyncio.Event()
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        self._block_at: int | None = None

    def block_at(self, number: int) -> None:
        """Reads no more once so many messages were sent."""
        self._block_at = number

    def give(self, *messages: dict[str, Any]) -> None:
        """What the application receives in place of the body; behind it nothing comes until the caller leaves."""
        self._messages = list(messages)

    async def receive(self) -> Any:
        """The body, then nothing until the caller leaves."""
        if self._messages:
            return self._messages.pop(0)
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Takes what comes, unless blocked."""
        if self._block_at is not None and len(self.sent) >= self._block_at:
            await asyncio.Event().wait()
        self.sent.append(message)
        self.news.set()


@dataclasses.dataclass
class Server:
    """An application and the engine behind it."""

    frontend: Frontend
    engine: FakeEngine

    def __post_init__(self):
        self.app = make_app(self.frontend)

    def post(self, path: str, value: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        """The answer to a body in JSON."""
        body = json.dumps(value).encode() if raw is None else raw
        return self.call("POST", path, body, {"content-type": "application/json", **_dashed(headers)})

    def get(self, path: str, **headers: str) -> Answer:
        """The answer to a GET."""
        return self.call("GET", path, b"", _dashed(headers))

    def call(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer to a request that is read to its end."""

        async def run() -> Answer:
            connection = Connection(method, path, body, headers)
            async with asyncio.timeout(20):
                await self.app(connection.scope, connection.receive, connection.send)
            return Answer(connection.sent)

        return asyncio.run(run())

    def drive(self, test: Callable[[Connection, "asyncio.Task[None]"], Any], path: str, value: Any) -> Answer:
        """Sends a request and lets a coroutine watch over it; then the application must end by itself."""

        async def run() -> Answer:
            headers = {"content-type": "application/json"}
            connection = Connection("POST", path, json.dumps(value).encode(), headers)
            async with asyncio.timeout(20):
                task = asyncio.ensure_future(self.app(connection.scope, connection.receive, connection.send))
                await test(connection, task)
                await task
            return Answer(connection.sent)

        return asyncio.run(run())


def _dashed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
