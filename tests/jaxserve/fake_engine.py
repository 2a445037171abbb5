"""An engine whose steps a test allows one by one."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from jaxserve import RequestError, RequestOutputKind, SamplingParams
from jaxserve.api.metric_types import Counter, Gauge, Metric
from jaxserve.api.request import Request
from jaxserve.engine.loop import Loop
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.scheduling.sequence import Sequence

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)
PATIENCE_S = 60.0


class FakeEngine:
    """Each step gives every request that is not paused its next token: 1000 times its number, then one more each."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.paused: set[str] = set()
        self.aborted: list[str] = []
        self.num_steps = 0
        self.is_closed = False
        self.before_step: Callable[[], None] | None = None
        self.threads: set[int] = set()
        self._changed = threading.Condition()
        self._allowed = 0
        self._num_entered = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def enqueue(self, request: RequestState) -> None:
        self.threads.add(threading.get_ident())
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        self.requests[request.request_id] = request

    def step(self) -> list[RequestState]:
        with self._changed:
            self._num_entered += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > self.num_steps, PATIENCE_S)
        self.threads.add(threading.get_ident())
        if self.before_step is not None:
            self.before_step()
        changed: dict[RequestState, None] = {}
        for request in self.requests.values():
            for sample in request.samples:
                sequence = sample.sequence
                if request.request_id in self.paused or sequence.finish_reason is not None:
                    continue
                sequence.token_ids.append(1000 * int(request.request_id) + sequence.num_output_tokens + 1)
                if len(sequence.token_ids) >= sequence.max_length:
                    sequence.finish_reason = "length"
                changed[request] = None
        for request in changed:
            if request.is_finished():
                del self.requests[request.request_id]
        self.num_steps += 1
        return list(changed)

    def abort(self, request: RequestState) -> None:
        if self.requests.pop(request.request_id, None) is None:
            return
        self.aborted.append(request.request_id)
        for sample in request.samples:
            sample.sequence.finish_reason = sample.sequence.finish_reason or "abort"

    def metrics(self) -> list[Metric]:
        names = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
        counters: list[Metric] = [Counter(f"jaxserve:{name}", {}, self.num_steps) for name in names]
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return [*counters, *(Gauge(f"jaxserve:{name}", {}, len(self.requests)) for name in gauges)]

    def close(self) -> None:
        self.is_closed = True

    def allow(self, count: int) -> None:
        """Lets that many more steps run. On the test's side, as what follows."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    async def run(self, count: int) -> None:
        """Lets that many steps run and waits until what they gave is handed over and the next step has begun."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._num_entered > self._allowed, PATIENCE_S)

        self.allow(count)
        await asyncio.to_thread(wait)


def make_request(number: int, num_tokens: int = 5, params: SamplingParams = DELTA) -> RequestState:
    request = Request(request_id=str(number), params=params)
    samples = [
        Sample(Sequence(request, [1, 2], 2, 2 + num_tokens, index=index), None, None) for index in range(params.n)
    ]
    return RequestState(request, [1, 2], samples, 0.0, 0.0)


class AtOnce(concurrent.futures.Executor):
    """Runs what is submitted before ``submit`` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        del kwargs  # whose turn it is
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args))
        return future


def start_loop(engine: FakeEngine, stats: StatsLogger | None = None) -> Loop:
    """A loop on its thread, which queues requests in the order of their submission."""
    loop: Any = Loop(engine, stats)
    loop._pool = AtOnce()
    return loop
