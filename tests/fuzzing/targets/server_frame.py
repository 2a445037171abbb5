"""Messages between front end and engine: any bytes are a message that can be sent again, or no message."""

from jaxserve.api.draft_metrics import RequestSpecDecodeMetrics
from jaxserve.api.metric_types import Counter, Gauge
from jaxserve.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.frames import HEADER
from jaxserve.parsers import ParserNames
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.wire import (
    Cancel,
    EngineInfo,
    Failure,
    Heartbeat,
    Outputs,
    Query,
    QueryResult,
    Start,
    Stop,
    Submit,
    pack,
    sendable_error,
    unpack,
)
from tests.fuzzing.frames import check_frame
from tests.fuzzing.target import Target

_LIMIT = 1 << 24
_PARAMS = SamplingParams(max_tokens=5, stop=["a"], logprobs=2, logit_bias={3: 1.5})
_DRAFTS = RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[1, 0, 0], per_step_accepted=[], per_step_drafted=[])
_OUTPUT = RequestOutput(
    request_id="a",
    prompt="x",
    prompt_token_ids=[1, 2],
    outputs=[CompletionOutput(0, "text", [1], None, None, spec_decode_metrics=_DRAFTS)],
    finished=True,
    metrics=RequestMetrics(),
)
_MESSAGES = (
    *(Start({"model": "demo"}, 5.0), Cancel([1, 2]), Query(1, "metrics", {}), Stop(1.0), Heartbeat()),
    *(Submit(1, Request(request_id="a", text="x", params=_PARAMS), 0.5), Outputs([(1, _OUTPUT)])),
    *(EngineInfo(model_pb2.Model(root="m"), {}, parsers=ParserNames()), Failure(sendable_error(KeyError("x")))),
    QueryResult(1, [Counter("a", {"b": "c"}, 1.0), Gauge("d", {}, 2.0), (1, 2)]),
)


def run(data: bytes) -> None:
    """Read a message; send what it says again."""
    check_frame(data, unpack, lambda message: pack(message, _LIMIT))


TARGET = Target(
    run,
    seeds=tuple(pack(message, _LIMIT)[HEADER.size :] for message in _MESSAGES),
    words=(b"\x81\xd4\1\0", b"\xc7\0\1", b"\xc7\0\x20", b"\x90", b"\x80", b"\xc0", b"\xa0", b"\xdd\xff\xff\xff\xff"),
    packages=("jaxserve.frames", "jaxserve.server.wire", "jaxserve.api"),
)
