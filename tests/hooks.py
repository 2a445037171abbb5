"""The only way from frozen tests to the inside of the project: internals to observe, to break, and to build on.

Frozen tests (``scripts/frozen_tests.py``) reach the product as its users do: ``jaxserve``, ``jaxserve.client``, the
protos, the command line and sockets. Whatever else they need has a name here, that says what it is rather than where it
is, so that a change of the inside edits this file and no frozen test. Helpers that know internals themselves are
reached through this file too: faults of a server's processes (``injected``, which cannot import this module), models
whose steps a test schedules, and random checkpoints.

What a hook returns or breaks must stay what its docstring says.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from checkpoints import CheckpointError as CheckpointError
from jaxserve import LLM, AsyncLLM, EngineConfig, PoolingParams, SamplingParams, running_model
from jaxserve.api.errors import DeadlineError as DeadlineError
from jaxserve.api.errors import RequestFailedError as RequestFailedError
from jaxserve.api.errors import own_failure as own_failure
from jaxserve.api.metric_types import Histogram as Histogram
from jaxserve.api.request import parse_prompt
from jaxserve.demo import MODEL_DIRECTORY as DEMO_DIRECTORY  # noqa: F401  (for tests)
from jaxserve.demo.tasks import chat_messages as chat_messages
from jaxserve.demo.tasks import held_out as held_out
from jaxserve.demo.tasks import is_correct as is_correct
from jaxserve.device import batch, compiling, slots
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.memory import MemoryLedger
from jaxserve.device.runner import LocalRunner
from jaxserve.device.slots import Slots, TokenMasks
from jaxserve.device.stage import Stage
from jaxserve.engine import engine as engine_module
from jaxserve.engine.model_defaults import writable_markers as writable_markers
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.engine.startup import StartedEngine
from jaxserve.layers import attention
from jaxserve.layers.expert_activations import ClampedSwiGLU as ClampedSwiGLU
from jaxserve.layers.model_config import RopeConfig as RopeConfig
from jaxserve.layers.parallel import DtypePolicy as DtypePolicy
from jaxserve.layers.routing import Routing as Routing
from jaxserve.layers.rows import ROW_TILE as ROW_TILE
from jaxserve.parsers import ToolCall as ToolCall
from jaxserve.scheduling import endings
from jaxserve.scheduling import step as scheduled_step
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence as ScheduledSequence
from jaxserve.server.errors import PermissionDeniedError as PermissionDeniedError
from jaxserve.server.errors import UnauthenticatedError as UnauthenticatedError
from jaxserve.server.errors import UnavailableError as UnavailableError
from jaxserve.server.main import EXIT_ENGINE_DEAD as EXIT_ENGINE_DEAD
from jaxserve.structured_output.constraints import BadWords
from jaxserve.structured_output.reasoning import ReasoningMarkers as ReasoningMarkers
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels import UnsupportedKernelError as UnsupportedKernelError
from pallas_kernels import native_library, paged_attention_mosaic
from scripts.soak_server import run_group as run_group
from scripts.soak_server import run_soak as run_soak
from sharding import LAYOUTS as LAYOUTS
from sharding import ShardingLayout as ShardingLayout
from sharding import get_layout as get_layout
from sharding.axes import DISPATCHES as DISPATCHES
from tests.faults.injected import sitecustomize as injected  # noqa: F401  (for tests)
from tests.random_checkpoint import LLAMA as LLAMA
from tests.random_checkpoint import write_checkpoint as write_checkpoint
from tests.random_checkpoint import write_checkpoint_with_tokenizer as write_checkpoint_with_tokenizer
from tests.scheduled_rows import ScheduledModel as ScheduledModel
from tests.scheduled_rows import Shape as Shape
from tests.scheduled_rows import Step as Step
from tests.tiny_programs import BACKEND as ATTENTION_BACKEND  # noqa: F401  (for tests)
from tests.tiny_programs import NUM_LAYERS as NUM_TINY_LAYERS  # noqa: F401  (for tests)

PATIENCE_S = 600.0
NAN_PROCESSOR = "tests.faults.nan_processor:NAN_FROM"
"""Name of a logits processor that makes a request's scores NaN from the position ``nan_from`` on."""
FOLDERS_WITH_TIMERS = ("jaxserve/server", "jaxserve/engine", "jaxserve/client")
"""Folders with the code that waits and times out."""

# ---------------------------------------------------------------- what an engine holds and has planned


class Held(NamedTuple):
    """What the requests of an engine with one scheduler hold.

    Attributes:
        unfinished: Number of requests that have not finished.
        running: Number of sequences that are in steps.
        waiting: Number of sequences in the queue.
        pages: Number of pages that are not free; cached pages are free.
    """

    unfinished: int
    running: int
    waiting: int
    pages: int


def held(llm: LLM) -> Held:
    """Return what the requests of an engine with one scheduler hold."""
    (replica,) = llm.engine.replicas
    (scheduler,) = replica.schedulers
    num_used = scheduler.allocator.num_pages - scheduler.allocator.num_free
    return Held(llm.engine.num_unfinished, len(scheduler.running), len(scheduler.waiting), num_used)


def num_unfinished(llm: LLM) -> int:
    """Return the number of requests that have not finished."""
    return llm.engine.num_unfinished


def own_tokenizer(llm: LLM) -> Tokenizer:
    """Return the tokenizer that the engine itself uses: ``encode``, ``decode`` and ``render_chat``."""
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer


def eos_token_ids(llm: LLM) -> tuple[int, ...]:
    """Return the tokens that end every completion."""
    return tuple(llm.engine.admission.limits.eos_token_ids)


def num_replicas(llm: LLM) -> int:
    """Return the number of copies of the model."""
    return len(llm.engine.replicas)


def num_devices(llm: LLM) -> int:
    """Return the number of devices of all copies of the model."""
    return llm.plan.num_devices


def num_stages(llm: LLM) -> int:
    """Return the number of pipeline stages."""
    return llm.plan.num_stages


def layout_name(llm: LLM) -> str:
    """Return the name of the layout in use."""
    return llm.plan.models[0].layout.name


def weights_dtype(llm: LLM) -> str:
    """Return the dtype in which weights are multiplied."""
    return llm.plan.models[0].policy.weights


def layer_tile(llm: LLM) -> int | None:
    """Return the rows of a tile in which layers are computed; None where each row is computed by itself."""
    return llm.plan.models[0].layer_tile


def planned_kernel(model: Path, **settings: Any) -> str:
    """Return the name of the attention kernel that an engine of these settings would have."""
    return _plan(model, settings).models[0].kernel.name


def pages_of_one_request(model: Path, **settings: Any) -> int:
    """Return the number of pages that a request of the longest context needs."""
    return _plan(model, settings).needs.request_pages


def plan_only(model: Path, **settings: Any) -> None:
    """Plan an engine, which logs what it will do, and load nothing."""
    _plan(model, settings)


def _plan(model: Path, settings: dict[str, Any]) -> EnginePlan:
    return plan_engine(EngineConfig.from_arguments(str(model), **settings))


# ---------------------------------------------------------------- requests and steps, one by one


def submit(llm: LLM, token_ids: Sequence[int], params: SamplingParams) -> str:
    """Queue a request; return its id."""
    return llm.engine.submit(parse_prompt({"prompt_token_ids": list(token_ids)}, params)).request_id


def step(llm: LLM) -> dict[str, str]:
    """Run one step; return the completions of the requests that it finished, by their ids."""
    changed = llm.engine.step()
    return {request.request_id: request.output().outputs[0].text for request in changed if request.is_finished()}


class PooledRequest(NamedTuple):
    """A finished request for an embedding: the vector, or why there is none."""

    embedding: Any
    error: Exception | None


def embed_together(llm: LLM, prompts: Sequence[str], params: Sequence[PoolingParams]) -> list[PooledRequest]:
    """Embed prompts in the same steps, without an exception where one fails."""
    pairs = zip(prompts, params, strict=True)
    requests = [llm.engine.prepare(parse_prompt(prompt, each, PoolingParams())) for prompt, each in pairs]
    for request in requests:
        llm.engine.enqueue(request)
    while llm.engine.num_unfinished:
        llm.engine.step()
    return [PooledRequest(request.embedding, request.error) for request in requests]


class WatchedStep(NamedTuple):
    """A step that an engine has run: the unfinished requests before it, and the number of programs it launched."""

    num_unfinished: int
    num_launched: int


def watch_steps(llm: LLM, patch: pytest.MonkeyPatch) -> list[WatchedStep]:
    """Note the steps of an engine with one copy of the model, in the list that is returned."""
    (replica,) = llm.engine.replicas
    steps, run = list[WatchedStep](), llm.engine.step

    def watched() -> Any:
        num_unfinished, num_steps = llm.engine.num_unfinished, replica.num_steps
        changed = run()
        steps.append(WatchedStep(num_unfinished, replica.num_steps - num_steps))
        return changed

    patch.setattr(llm.engine, "step", watched)
    return steps


def interrupt_step(llm: LLM, patch: pytest.MonkeyPatch, number: int) -> None:
    """Raise KeyboardInterrupt in the call that waits for a step, counted from 1, as Ctrl-C does."""
    steps, run = [], llm.engine.step
    is_raised, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def raise_once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        is_raised.set()
        raise KeyboardInterrupt

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == number:
            # One that comes just before the main thread begins to wait is seen once it wakes up, so send another then.
            for _ in range(60):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if is_raised.wait(1):
                    break
            assert is_raised.is_set(), "the main thread has not seen the signal"
        return run()

    signal.signal(signal.SIGINT, raise_once)
    patch.setattr(llm.engine, "step", interrupted)


# ---------------------------------------------------------------- start of an engine, and its programs


def refuse_to_compile(patch: pytest.MonkeyPatch) -> None:
    """Fail the test once an engine begins to compile its steps."""

    def refuse(self: Stage) -> None:
        pytest.fail("compiled before the error was found")

    patch.setattr(Stage, "compile", refuse)


def count_compiled(patch: pytest.MonkeyPatch) -> list[int]:
    """Add an item to the list that is returned for each program that an engine compiles."""
    compiled, compile_one = list[int](), compiling._compile
    patch.setattr(compiling, "_compile", lambda *given: compiled.append(1) or compile_one(*given))
    return compiled


def watch_programs(patch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Note for each step whether its program is for decode alone, and its rows if all decode, else 0."""
    decoded, build = list[tuple[bool, int]](), batch.build

    def noted(held: Any, plan: Any, shape: Any, *sizes: int) -> Any:
        decoded.append((shape.decode_only, plan.num_rows if plan.is_decode_only else 0))
        return build(held, plan, shape, *sizes)

    patch.setattr(batch, "build", noted)
    return decoded


def watch_kernel_sizes(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note the sizes on one device for which an attention kernel is chosen: ``num_heads``, ``page_size`` and others."""
    asked, choose = list[dict[str, Any]](), attention.choose
    patch.setattr(attention, "choose", lambda *args, **kinds: asked.append(kinds) or choose(*args, **kinds))
    return asked


def pretend_to_plan_for_a_hopper(patch: pytest.MonkeyPatch) -> None:
    """Plan engines as if the device were a Hopper GPU with a version of JAX that compiles for it."""
    policy = DtypePolicy.for_platform("bfloat16", "gpu")
    patch.setattr(DtypePolicy, "for_platform", lambda dtype, platform: policy)
    patch.setattr(paged_attention_mosaic, "not_hopper", lambda platform, device_kind: None)
    patch.setattr(paged_attention_mosaic, "missing_jax", lambda: None)


def watch_warm_ups(patch: pytest.MonkeyPatch) -> list[object]:
    """Note the device runners that are warmed up, in place of warming them up."""
    warmed = list[object]()
    patch.setattr(LocalRunner, "warm_up", lambda runner: warmed.append(runner))
    return warmed


def why_no_native_kernels() -> str | None:
    """Return why this machine has no native kernels, or None if it has them."""
    return native_library.unavailable()


@contextlib.contextmanager
def native_threads(number: int) -> Iterator[None]:
    """Run native kernels on this number of threads while the block runs."""
    native_library.set_threads(number)
    try:
        yield
    finally:
        native_library.set_threads(None)


# ---------------------------------------------------------------- AsyncLLM


def is_preparing(engine: AsyncLLM) -> bool:
    """Whether a request is not yet queued: its prompt is still being tokenized, for example."""
    return bool(engine._loop._preparing)


def hold_preparation(engine: AsyncLLM, patch: pytest.MonkeyPatch) -> threading.Event:
    """Keep requests from being prepared until the event that is returned is set."""
    may_go_on, prepare = threading.Event(), engine.engine.prepare

    def slow(*arguments: Any, **more: Any) -> Any:
        assert may_go_on.wait(PATIENCE_S)
        return prepare(*arguments, **more)

    patch.setattr(engine.engine, "prepare", slow)
    return may_go_on


def break_launches(engine: AsyncLLM, patch: pytest.MonkeyPatch, after: int, error: Exception) -> None:
    """Raise an error in place of every launch of a step after the first ones."""
    replica = engine.engine.replicas[0]
    launch, launches = replica.launch, []

    def broken() -> Any:
        launches.append(1)
        if len(launches) > after:
            raise error
        return launch()

    patch.setattr(replica, "launch", broken)


def start_idle_engines(patch: pytest.MonkeyPatch) -> list[bool]:
    """Start engines that have no model and do nothing; each adds True to the list when it is closed."""
    closed: list[bool] = []

    class Idle:
        num_unfinished = 0

        def close(self) -> None:
            closed.append(True)

        enqueue = step = abort = metrics = close

    started = Mock(spec=StartedEngine, engine=Idle(), ledger=Mock(spec=MemoryLedger, device="CPU"))
    patch.setattr(running_model, "start_engine", lambda config: started)
    return closed


def thread_state(engine: AsyncLLM) -> Callable[[], bool]:
    """Return a function that tells whether the engine's thread runs, and does not keep the engine alive."""
    loop = engine._loop
    return lambda: loop.is_running


# ---------------------------------------------------------------- failures of one row


def _of_long_prompt(sequence: ScheduledSequence) -> bool:
    return sequence.num_prompt_tokens > 10


def _pools_by_mean(sequence: ScheduledSequence) -> bool:
    pooling = sequence.request.pooling
    return pooling is not None and pooling.pooling == "mean"


def _only_slot(masks: TokenMasks) -> int:
    """Return the only slot with a static mask."""
    return next(iter(masks._slots))


_PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "static mask": (TokenMasks, "_slot_mask", lambda self, sampling: True),
    "row mask": (TokenMasks, "_row_words", lambda self, slot, *rest: slot == _only_slot(self)),
    "parameters": (Slots, "_set_params", lambda self, slot, s: s.logit_bias != ()),
    "bias": (slots, "slot_row", lambda setup, size: bool(setup.sampling.logit_bias)),
    "chunk": (scheduled_step, "_targets", lambda sequence, *rest: _of_long_prompt(sequence)),
    "constraint's mask": (BadWords, "mask", lambda self: True),
    "constraint's next state": (BadWords, "accept", lambda self, token: True),
    "ending": (endings, "ends_in_repetition", lambda *arguments: True),
    "scores of the prompt": (RequestState, "add_prompt_logprobs", lambda *arguments: True),
    "scores": (Sample, "score", lambda *arguments: True),
    "text": (Detokenizer, "push_tokens", lambda self, tokens: bool(self._stops)),
    "queue": (Scheduler, "add", lambda self, sequence: _of_long_prompt(sequence)),
    "vector": (engine_module, "pooled_vector", lambda total, count, one: one.pooling == "mean"),
    "chunk of a vector": (scheduled_step, "_chunk_pooling", lambda sequence, *rest: _pools_by_mean(sequence)),
}


def fail(patch: pytest.MonkeyPatch, place: str, make_error: Callable[[], BaseException]) -> list[int]:
    """Make host code fail for one request of several; return a list with an item for each failure so far.

    Args:
        patch: Undoes it.
        place: What fails:

            * static mask, row mask: the mask of allowed tokens, of a slot or of a row of a step
            * parameters, bias: writing a slot's sampling parameters, or its biases
            * chunk: planning a chunk of a prompt of more than 10 tokens
            * constraint's mask, constraint's next state: a constraint by bad words
            * ending: looking for repetitions
            * scores of the prompt, scores, text: delivering logprobs of a prompt, logprobs, or text with stop strings
            * queue: queueing a prompt of more than 10 tokens
            * vector, chunk of a vector: pooling by the mean, and planning a chunk for it
        make_error: Makes the exception.
    """
    owner, name, is_meant = _PLACES[place]
    original, raised = getattr(owner, name), list[int]()

    def maybe(*arguments: Any, **options: Any) -> Any:
        if is_meant(*arguments, **options):
            raised.append(1)
            raise make_error()
        return original(*arguments, **options)

    patch.setattr(owner, name, maybe)
    return raised
