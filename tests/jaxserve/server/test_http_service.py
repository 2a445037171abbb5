"""Models, health, tokens, embeddings, and what every route has: ids, cross-origin headers, the access log."""

import base64
import logging
import re
import struct
from typing import Any

import pytest

import jaxserve
from jaxserve.api.errors import EngineDeadError
from tests.jaxserve.server.http_fakes import CHAT, FakeEngine, make_server


def test_models_are_listed_by_every_name() -> None:
    server = make_server(served_model_name=["org/small", "alias"])
    found = server.get("/v1/models").json()
    assert found["object"] == "list"
    card = found["data"][0]
    assert [one["id"] for one in found["data"]] == ["org/small", "alias"]
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "models/tiny", 100)
    assert card["parent"] is None and card["owned_by"] and card["permission"][0]["object"] == "model_permission"
    assert server.get("/v1/models/org/small").json() == card
    assert server.get("/v1/models/").status == 404
    answer = server.get("/v1/models/other")
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    named = {"prompt": "Hi", "model": "alias"}
    assert server.post("/v1/completions", named).json()["model"] == "org/small"
    assert server.post("/v1/completions", {"prompt": "Hi"}).json()["model"] == "org/small"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_turns_with_gate_and_engine(path: str) -> None:
    server = make_server()
    assert (server.get(path).status, server.get(path).body) == (200, b"")
    server.engine.dead = EngineDeadError("gone")
    assert (server.get(path).status, server.get(path).body) == (503, b"")
    server.engine.dead = None
    assert server.get(path).status == 200
    server.frontend.ledger.close("draining")
    assert server.get(path).status == 503
    assert server.call("HEAD", path, b"", {}).status == 503


def test_a_dead_engine_is_unavailable() -> None:
    server = make_server()
    server.engine.dead = EngineDeadError("the engine process ended")
    for answer in (server.post("/v1/completions", {"prompt": "Hi"}), server.get("/v1/models")):
        assert answer.status == 503
        assert answer.error["message"] == "the engine process ended"
        assert answer.headers["retry-after"] == "1"


def test_version_load_and_metrics() -> None:
    server = make_server(enable_server_load_tracking=True)
    assert server.get("/version").json() == {"version": jaxserve.__version__}
    assert server.get("/load").json() == {"server_load": 0}
    with server.frontend.ledger.admit(server.frontend.authenticator.caller(None), 3):
        assert server.get("/load").json() == {"server_load": 3}
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"# TYPE jaxserve:" in metrics.body
    assert make_server().get("/load").status == 404


def test_the_status_page_may_be_left_out() -> None:
    assert make_server().get("/").headers["content-type"].startswith("text/html")
    server = make_server(disable_status_page=True)
    assert (server.get("/").status, server.get("/status.json").status) == (404, 404)


def test_texts_are_tokenized() -> None:
    server = make_server()
    assert server.post("/tokenize", {"prompt": "Hi"}).json() == {
        **{"count": 3, "max_model_len": 100, "tokens": [1, 72, 105], "token_strs": None}
    }
    request = {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}
    assert server.post("/tokenize", request).json() == {
        **{"count": 2, "max_model_len": 100, "tokens": [72, 105], "token_strs": ["H", "i"]}
    }
    assert server.post("/tokenize", {"prompt": ""}).json()["count"] == 1


def test_conversations_are_tokenized() -> None:
    server = make_server(FakeEngine(rendered="u:Hi"))
    found = server.post("/tokenize", {"messages": CHAT}).json()
    assert (found["count"], found["tokens"], found["token_strs"]) == (4, [117, 58, 72, 105], None)
    request = {"messages": CHAT, "add_generation_prompt": False, "return_token_strs": True}
    assert server.post("/tokenize", request).json()["token_strs"] == ["u", ":", "H", "i"]
    assert server.engine.request.chat == {
        **{"messages": CHAT, "add_generation_prompt": False, "continue_final_message": False}
    }


def test_token_ids_become_text() -> None:
    server = make_server()
    assert server.post("/detokenize", {"tokens": [72, 105]}).json() == {"prompt": "Hi"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("given", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_prompts_become_vectors(given: Any) -> None:
    server = make_server()
    found = server.post("/v1/embeddings", {"input": given, "model": "tiny"}).json()
    assert re.fullmatch("embd-[0-9a-f]{32}", found["id"])
    assert found["object"] == "list"
    assert found["data"] == [{"index": 0, "object": "embedding", "embedding": [0.5, -0.25]}]
    assert found["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    pooling = server.engine.request.pooling
    assert pooling is not None and (pooling.pooling, pooling.normalize) == ("last", True)


def test_vectors_of_a_batch_keep_their_order_and_may_be_base64() -> None:
    server = make_server(strict=True)
    request = {"input": ["a", "bcd"], "encoding_format": "base64", "pooling": "mean", "normalize": False}
    answer = server.post("/v1/embeddings", {**request, "priority": 1, "truncate_prompt_tokens": -1})
    assert answer.status == 200, answer.body
    found = answer.json()
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert struct.unpack("<2f", base64.b64decode(found["data"][1]["embedding"])) == (0.5, -0.25)
    assert found["usage"]["prompt_tokens"] == 4
    counts = server.frontend.log.counts
    assert (counts.prompt_tokens, counts.cached_tokens, counts.finished["ok"]) == (4, 2, 2)
    pooling = server.engine.request.pooling
    assert pooling is not None and (pooling.pooling, pooling.normalize) == ("mean", False)
    assert server.engine.request.truncate_prompt_tokens == -1


def test_a_vector_with_values_that_are_no_numbers_is_a_failure() -> None:
    server = make_server()
    server.engine.vector = [float("nan")]
    answer = server.post("/v1/embeddings", {"input": "a"})
    assert (answer.status, answer.error["type"]) == (500, "InternalServerError")


def test_request_ids_are_labels() -> None:
    server = make_server(enable_request_id_headers=True)
    answer = server.post("/v1/completions", {"prompt": "Hi"}, X_Request_Id="mine")
    assert answer.headers["x-request-id"] == "mine"
    assert "mine" not in answer.json()["id"]
    assert all("mine" not in name for name in server.engine.requests)
    assert re.fullmatch("req-[0-9a-f]{32}", server.get("/health").headers["x-request-id"])
    assert server.get("/health", X_Request_Id="no spaces please").headers["x-request-id"].startswith("req-")
    assert "x-request-id" not in make_server().get("/health", X_Request_Id="mine").headers


def test_the_access_log_has_one_line_a_request_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(api_key=["hunter2"])
    body = {"prompt": "my secret", "request_id": "ten\n"}
    with caplog.at_level(logging.INFO, "jaxserve.server.http_api"):
        server.post("/v1/completions", body, authorization="Bearer hunter2")
        server.post("/v1/completions", body, authorization="Bearer hunter3", X_Request_Id="mine")
        server.get("/a\nb")
    lines = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"\d\.\d{3}s", "0s", line) for line in lines] == [
        '127.0.0.1:5000 "POST /v1/completions" 200 0s label=ten\\n',
        '127.0.0.1:5000 "POST /v1/completions" 401 0s label=mine',
        '127.0.0.1:5000 "GET /a\\nb" 401 0s',
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaxserve.server.http_api"):
        make_server(disable_access_log=True).get("/health")
    assert not caplog.records


def test_pages_of_allowed_origins_may_call() -> None:
    server = make_server(allowed_origins=["https://page.example"])
    answer = server.post("/v1/completions", {"prompt": ""}, origin="https://page.example")
    assert answer.status == 400
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    other = server.post("/v1/completions", {"prompt": ""}, origin="https://other.example")
    assert "access-control-allow-origin" not in other.headers
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert server.call("OPTIONS", "/v1/completions", b"", asked).status == 200
    closed = make_server().call("OPTIONS", "/v1/completions", b"", asked)
    assert closed.status == 405 and "access-control-allow-origin" not in closed.headers


def test_a_proxy_may_put_a_path_in_front() -> None:
    server = make_server(api_key=["key"], root_path="/llm")
    for front in ("/llm", ""):  # it may take it away again
        assert server.get(f"{front}/health").status == 200
        assert server.get(f"{front}/v1/models").status == 401
        assert server.get(f"{front}/v1/models", authorization="Bearer key").status == 200
    assert server.get("/llm/llm/health", authorization="Bearer key").status == 404


def test_web_sockets_are_closed() -> None:
    server, sent = make_server(), list[Any]()

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": []}
    with pytest.raises(StopIteration):
        server.app(scope, receive, send).__await__().send(None)
    assert sent == [{"type": "websocket.close"}]


def test_probes_tell_apart_starting_serving_draining_and_lost() -> None:
    server = make_server()
    frontend = server.frontend

    def probes() -> tuple[int, ...]:
        return tuple(server.get(path).status for path in ("/livez", "/readyz", "/startupz", "/health"))

    frontend.ledger.close("the server is starting")
    frontend.has_started = False
    assert probes() == (200, 503, 503, 503)
    assert server.get("/readyz").body == b"the server is starting\n"
    frontend.ledger.open(10)
    frontend.has_started = True
    assert probes() == (200, 200, 200, 200)
    frontend.is_draining = True
    assert probes() == (200, 503, 200, 503)
    assert server.get("/version").headers["connection"] == "close"
    frontend.is_lost = True
    assert probes() == (503, 503, 200, 503)
