"""A front end over an engine that is none: what it does is written down beforehand, so that every number is known."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from jaxserve.api.metric_types import Metric
from jaxserve.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.scheduling.drafts import DraftCounts
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.server.auth import Caller
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.errors import UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo

ANYBODY = Caller("anybody", frozenset(("generate", "metrics")))
TIMES = RequestMetrics(
    num_generation_tokens=3,
    arrival_time=1.7e9,
    queued_ts=10.5,
    scheduled_ts=11.0,
    first_token_ts=13.0,
    last_token_ts=17.0,
    first_token_latency=3.0,
)
"""Half a second until queued, half in the queue, two for the prompt, four for the rest."""
MODEL = model_pb2.Model(
    root="models/tiny",
    max_model_len=100,
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=32000,
    mesh=[model_pb2.MeshAxis(name="data", size=2), model_pb2.MeshAxis(name="tensor", size=4)],
    device="cpu",
    layout="tensor",
    attention_backend="xla",
    kv_cache=model_pb2.KvCache(
        num_pages=50, page_size=16, num_tokens=800, max_concurrency=7.5, size_bytes=3 << 20, dtype="float32"
    ),
    memory=[
        model_pb2.MemoryUse(name="weights", size_bytes=600 << 20),
        model_pb2.MemoryUse(name="KV pages", size_bytes=300 << 20),
        model_pb2.MemoryUse(name="per-request state", size_bytes=5 << 20),
        model_pb2.MemoryUse(name="peak temporaries of a step", size_bytes=100 << 20),
    ],
    max_num_seqs=8,
    max_num_batched_tokens=512,
)


def output(
    *texts: tuple[str, int],
    reason: Any = None,
    prompt: int = 3,
    cached: int = 1,
    finished: bool | None = None,
    times: RequestMetrics | None = None,
) -> RequestOutput:
    """What is new: a text and a number of tokens for each sample."""
    return RequestOutput(
        request_id="r",
        prompt="Hello",
        prompt_token_ids=[1] * prompt,
        outputs=[CompletionOutput(i, text, [5] * n, finish_reason=reason) for i, (text, n) in enumerate(texts)],
        finished=reason is not None if finished is None else finished,
        num_cached_tokens=cached,
        metrics=times,
    )


ANSWER = (output((" a", 1)), output((" b", 2), reason="length", times=TIMES))


class FakeReplica:
    """A replica with two sequences running and one waiting."""

    class Scheduler:
        """Its scheduler."""

        running, waiting, num_preemptions = (1, 2), (3,), 4
        limits, draft_counts = SchedulerLimits(2, 8), DraftCounts()
        counts = {"num_queried_tokens": 30, "num_hit_tokens": 12, "num_states": 5}
        pages = type("Pages", (), {**counts, "misses": Counter({"evicted": 3})})
        allocator = type("Allocator", (), {"usage": 0.25})

    schedulers, num_steps, num_decode_rows = (Scheduler,), 7, 9
    num_stage_ticks, num_idle_stage_ticks = 14, 1


def engine_numbers() -> list[Metric]:
    """All that a real engine measures."""
    collect = getattr(EngineMetrics.collect, "__wrapped__", EngineMetrics.collect)
    return collect(EngineMetrics(1000), [cast("Any", FakeReplica)], 0)


class ObservedEngine(EngineClient):
    """Answers each request with what ``script`` holds: outputs, errors to raise, seconds to wait."""

    def __init__(self, *script: RequestOutput | BaseException | float):
        self.script: Sequence[RequestOutput | BaseException | float] = script or ANSWER
        self.is_ready = True
        self.numbers: list[Metric] | Exception = engine_numbers()
        self.has_chat = True
        self.requests: list[Request] = []

    @property
    def info(self) -> EngineInfo:
        """What runs, once it does."""
        if not self.is_ready:
            raise UnavailableError("the engine is not ready")
        return EngineInfo(model=MODEL, default_fields={}, chat_templates={"default": "…"} if self.has_chat else {})

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Plays the script."""
        self.requests.append(request)
        for item in self.script:
            if isinstance(item, RequestOutput):
                yield item
            elif isinstance(item, BaseException):
                raise item
            else:
                await asyncio.sleep(item)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False, turn: Turn = SHARED_TURN
    ) -> tuple[list[int], list[str]]:
        """Nothing."""
        return [], []

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, turn: Turn = SHARED_TURN
    ) -> str:
        """Nothing."""
        return ""

    async def render_chat(self, chat: Mapping[str, Any], turn: Turn = SHARED_TURN) -> tuple[str, list[int]]:
        """A prompt."""
        return "prompt", [1]

    async def tokenizer_info(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    async def metrics(self) -> list[Metric]:
        """What was put there."""
        if isinstance(self.numbers, Exception):
            raise self.numbers
        return self.numbers

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Nothing."""
        return []

    async def reset_prefix_cache(self) -> None:
        """Nothing."""

    async def start_profile(self, directory: str) -> None:
        """Nothing."""

    async def stop_profile(self) -> None:
        """Nothing."""


def make_frontend(engine: ObservedEngine | None = None, **settings: Any) -> Frontend:
    """An open front end with a model named ``tiny``."""
    frontend = Frontend(ServerConfig(**settings), engine or ObservedEngine(), "tiny")
    frontend.ledger.open(40)
    return frontend


async def read_all(frontend: Frontend, text: str = "Hello", name: str = "cmpl-1", **fields: Any) -> list[RequestOutput]:
    """Sends a request as a surface does, and reads its answer to the end."""
    params = fields.pop("params", SamplingParams(max_tokens=8))
    request = Request(request_id=name, text=text, params=params, **fields)
    with frontend.ledger.admit(ANYBODY):
        return [one async for one in frontend.generate(frontend.entry(ANYBODY, request))]
