"""A request that was running at two ends of the engine process is not run a third time."""

from typing import Any

import pytest

from jaxserve.api.errors import EngineDeadError, RequestFailedError
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.server.poison import PoisonList
from tests.jaxserve.server.http_fakes import FakeEngine, Server, make_server


def dying_server() -> Server:
    """A server whose engine process ends at each request."""
    engine = FakeEngine()
    engine.error = EngineDeadError("the engine process ended")
    return make_server(engine)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_the_third_one_is_refused_with_its_id(path: str, body: dict[str, Any]) -> None:
    server = dying_server()
    body = {"model": "tiny", **body}
    assert [server.post(path, body).status for _ in range(2)] == [503, 503]
    num_run = len(server.engine.requests)
    refused = server.post(path, body)
    assert refused.status == 500
    assert "is not run: the same request was running at 2 ends of the engine process" in refused.error["message"]
    assert "request " in refused.error["message"]
    assert len(server.engine.requests) == num_run
    server.engine.error = None
    other = {**body, ("input" if "input" in body else "user"): "other"}
    if "input" in body:
        assert server.post(path, other).status == 200
    assert server.post("/v1/completions", {"prompt": "another"}).status == 200


def test_one_that_waited_is_not_to_blame() -> None:
    server = dying_server()
    server.frontend.ledger.open(10, max_num_seqs=1)

    class Busy:
        caller = ""
        num_waiting_tokens = 0
        num_seqs = 1

    with server.frontend.ledger.entered(Busy()):
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "Hi"}).status == 503


def test_others_parameters_and_callers_are_others() -> None:
    known = PoisonList()
    request = Request(text="a", request_id="one")
    for _ in range(2):
        known.check("me", request)
        known.note_death("me", request)
    with pytest.raises(RequestFailedError, match="request two is not run"):
        known.check("me", Request(text="a", request_id="two"))
    streamed = SamplingParams(output_kind=RequestOutputKind.DELTA)
    with pytest.raises(RequestFailedError, match="request three is not run"):
        known.check("me", Request(request_id="three", text="a", params=streamed))
    known.check("you", request)
    known.check("me", Request(text="a", params=SamplingParams(max_tokens=3)))
    known.check("me", Request(text="b"))
    for number in range(2000):
        known.note_death("me", Request(text=str(number)))
    known.check("me", request)  # long ago
