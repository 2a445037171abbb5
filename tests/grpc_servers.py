"""gRPC servers in this process, on free ports, in front of an engine that does what a test tells it to."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from jaxserve.api.metric_types import Gauge, Metric
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.parsers import ParserNames
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.errors import UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.server import GrpcServer
from jaxserve.server.proto.jaxserve.v1 import admin_pb2, model_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo

PATIENCE_S = 60.0
LIMIT = 8
"""Texts that the ledger of a test server takes."""
Result = TypeVar("Result")

MODEL = model_pb2.Model(
    root="/models/fake",
    max_model_len=128,
    architecture="FakeForCausalLM",
    dtype="float32",
    vocab_size=300,
    mesh=[model_pb2.MeshAxis(name="data", size=2), model_pb2.MeshAxis(name="model", size=4)],
    device="cpu",
    layout="fake",
    attention_backend="xla",
    kv_cache=model_pb2.KvCache(num_pages=10, page_size=16, size_bytes=4096),
    memory=[model_pb2.MemoryUse(name="weights", size_bytes=1000)],
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


RESHARD_NUMBERS = [
    field.name for field in admin_pb2.ReshardResponse.DESCRIPTOR.fields if not field.name.startswith(("from_", "to_"))
]


class FakeEngine(EngineClient):
    """Says ``INDEX:STEP `` in each step of each text, and notes what it is asked for.

    Attributes:
        requests: What came, by the request's name.
        running: Names of those that have not ended.
        num_steps: Tokens of each text.
        stops_at: Step before which a request waits until ``go`` is set; None for no step. 0 is the queue.
        reached: Set where a request has come there.
        error: Raised in place of the step ``fails_at``.
        texts: Texts of the steps in place of the usual ones.
        calls: Names of other methods that were called, with their arguments.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.running: set[str] = set()
        self.num_steps = 4
        self.stops_at: int | None = None
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.fails_at = 0
        self.texts: Sequence[str] | None = None
        self.is_ready = True
        self.joins = False
        self.default_fields: dict[str, Any] = {}
        self.parsers = ParserNames()
        self.calls: list[tuple[str, Any]] = []

    @property
    def last(self) -> Request:
        """The newest request."""
        return list(self.requests.values())[-1]

    @property
    def info(self) -> EngineInfo:
        """A small model."""
        if not self.is_ready:
            raise UnavailableError("the server is starting")
        return EngineInfo(model=MODEL, default_fields=self.default_fields, parsers=self.parsers)

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Deltas, or one output at the end."""
        self.requests[request.request_id] = request
        self.running.add(request.request_id)
        try:
            outputs = self._joined(request) if self.joins else self._steps(request)
            async with contextlib.aclosing(outputs):
                if request.params.output_kind is RequestOutputKind.FINAL_ONLY:
                    yield _whole([output async for output in outputs])
                    return
                async for output in outputs:
                    yield output
        finally:
            self.running.remove(request.request_id)

    async def _steps(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        for step in range(self.num_steps):
            if step == self.stops_at:
                self.reached.set()
                await self.go.wait()
            if self.error is not None and step == self.fails_at:
                raise self.error
            await asyncio.sleep(0)
            yield self._output(request, step)

    async def _joined(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """As ``_steps``, but steps go on while nobody reads, and what they give is joined."""
        waiting: list[RequestOutput] = []
        has_news = asyncio.Event()

        async def step() -> None:
            async for output in self._steps(request):
                waiting.append(output)
                has_news.set()

        stepping = asyncio.create_task(step())
        try:
            while True:
                await has_news.wait()
                has_news.clear()
                taken, waiting[:] = waiting[:], []
                yield _whole(taken)
                if taken[-1].finished:
                    return
        finally:
            stepping.cancel()

    def _output(self, request: Request, step: int) -> RequestOutput:
        prompt_ids = list(request.token_ids or (1, 2, 3))
        is_last = step == self.num_steps - 1
        outputs = [
            CompletionOutput(
                index=index,
                text=f"{index}:{step} " if self.texts is None else self.texts[step],
                token_ids=[10 * index + step],
                finish_reason="stop" if is_last else None,
                stop_reason="." if is_last else None,
            )
            for index in range(request.params.n)
        ]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.text if request.chat is None else "<chat>",
            prompt_token_ids=prompt_ids,
            outputs=outputs,
            finished=is_last,
            num_cached_tokens=2,
        )

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False, turn: Turn = SHARED_TURN
    ) -> tuple[list[int], list[str]]:
        """A token a character, with 1 in front."""
        if self.error is not None:
            raise self.error
        return [1] * add_special_tokens + [ord(one) for one in text], list(text) if with_strings else []

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, turn: Turn = SHARED_TURN
    ) -> str:
        """The other way."""
        return "".join(chr(one) for one in token_ids if one != 1 or not skip_special_tokens)

    async def render_chat(self, chat: Mapping[str, Any], turn: Turn = SHARED_TURN) -> tuple[str, list[int]]:
        """The contents behind each other."""
        self.calls.append(("render_chat", chat))
        text = "|".join(message.get("content", "") for message in chat["messages"])
        return text, [ord(one) for one in text]

    async def tokenizer_info(self) -> dict[str, Any]:
        """Nothing; gRPC does not ask."""
        return {}

    async def metrics(self) -> list[Metric]:
        """Some of the engine's gauges."""
        gauges = {"num_requests_running": 3, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.25}
        return [Gauge(f"jaxserve:{name}", {}, value) for name, value in gauges.items()]

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Notes it."""
        self.calls.append(("abort", list(request_ids)))
        return [name for name in request_ids if name in self.running]

    async def reset_prefix_cache(self) -> None:
        """Notes it."""
        self.calls.append(("reset_prefix_cache", None))

    async def reshard(self, mesh: str | None, layout: str | None) -> dict[str, Any]:
        """Notes it, and tells what the engine may tell."""
        self.calls.append(("reshard", (mesh, layout)))
        numbers = {name: index for index, name in enumerate(RESHARD_NUMBERS, 1)}
        meshes = {"from_mesh": {"data": 1, "tensor": 1}, "to_mesh": {"data": 1, "tensor": 2}}
        return {**meshes, "from_layout": "tensor_parallel", "to_layout": "replicated", **numbers}

    async def start_profile(self, directory: str) -> None:
        """Notes it."""
        self.calls.append(("start_profile", directory))

    async def stop_profile(self) -> None:
        """Notes it."""
        self.calls.append(("stop_profile", None))


def _whole(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Parts of an answer that follow each other, as one."""
    joined: dict[int, CompletionOutput] = {}
    for part in parts:
        for new in part.outputs:
            old = joined.get(new.index)
            if old is not None:
                new = dataclasses.replace(new, text=old.text + new.text, token_ids=[*old.token_ids, *new.token_ids])
            joined[new.index] = new
    return dataclasses.replace(parts[-1], outputs=[joined[index] for index in sorted(joined)])


@dataclasses.dataclass
class Serving:
    """A server that listens, and what is behind it."""

    server: GrpcServer
    engine: FakeEngine
    frontend: Frontend
    drains: list[float | None]

    @property
    def target(self) -> str:
        """Of the public listener."""
        return f"127.0.0.1:{self.server.port}"

    @property
    def admin_target(self) -> str:
        """Of the admin listener."""
        return f"127.0.0.1:{self.server.admin_port}"

    async def until_idle(self) -> None:
        """Until the engine has got a request and runs none any more."""
        while not self.engine.requests or self.engine.running:
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(parsers: ParserNames = ParserNames(), **settings: Any) -> AsyncIterator[Serving]:  # noqa: B008
    """A server that is ready while the block runs."""
    config = ServerConfig(**{"port": -1, "grpc_port": 0, "admin_port": 0, **settings})
    engine, drains = FakeEngine(), list[float | None]()
    engine.parsers = parsers
    frontend = Frontend(config, engine, "fake")
    server = GrpcServer(frontend, drains.append)
    await server.start()
    frontend.ledger.open(LIMIT)
    server.set_serving(True)
    try:
        yield Serving(server, engine, frontend, drains)
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def connected(target: str, *options: tuple[str, Any]) -> AsyncIterator[Any]:
    """A channel while the block runs."""
    async with grpc.aio.insecure_channel(target, options) as channel:
        yield channel


def run(main: Callable[[], Awaitable[Result]]) -> Result:
    """Runs a test's coroutine, not for ever."""

    async def bounded() -> Result:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())
