"""What is answered to requests that cannot be: one object, its status, and never a 5xx for what a caller did."""

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from jaxserve.api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, RequestFailedError
from jaxserve.parsers import ParserNames
from jaxserve.server.errors import UnavailableError
from jaxserve.server.http_api.fields import MAX_NESTING
from tests.jaxserve.server.http_fakes import CHAT, Answer, Connection, FakeEngine, Server, make_server
from tests.observed_engine import ANYBODY

COMPLETIONS, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OPEN_PATHS = {"/health", "/ping", "/livez", "/readyz", "/startupz", "/version", "/"}


def refusal(
    answer: Any, status: int = 400, kind: str = "BadRequestError", param: str | None = None, match: str = ""
) -> None:
    """Checks an error."""
    assert answer.status == status, answer.body
    error = answer.error
    assert (error["type"], error["param"]) == (kind, param)
    assert match in error["message"]


def nested(levels: int) -> Any:
    """A list of lists."""
    return functools.reduce(lambda inner, _: [inner], range(levels), 1)


@pytest.mark.parametrize(
    ("change", "param", "match"),
    [
        ({"prompt": None}, "prompt", "the field 'prompt' is missing"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
        ({"prompt": [[1], []]}, "prompt", "none of them empty"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "prompt must be an int, got str"),
        ({"prompt": [True]}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": [-1]}, "prompt", "at least 0"),
        ({"prompt": [1000]}, "prompt", "token id 1000 is out of vocabulary"),
        ({"prompt": [10**30]}, "prompt", "out of vocabulary"),
        ({"prompt": ["a"] * 5}, "prompt", "at most 4 prompts, got 5"),
        ({"model": 3}, "model", "must be a string, got int"),
        ({"stream": "yes"}, "stream", "must be True or False"),
        ({"temperature": 3}, "temperature", "temperature must be in [0, 2]"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "must be an int"),
        ({"max_tokens": 10**20}, "max_tokens", "less than 2"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids", "less than 2"),
        ({"logit_bias": {str(2**70): 1}}, "logit_bias", "less than 2"),
        ({"logit_bias": {" 99999999999999999999": 1}}, "logit_bias", "token ids from 0 to 999"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids", "token ids from 0 to 999"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 20000}, "n", "at most 16384"),
        ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of is not supported unless it equals n=2"),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"logprobs": -2}, "logprobs", "at least -1"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only be defined when `stream=True`"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "must be True or False"),
        ({"seed": 2**63}, "seed", "less than 2**63 and more than -2**63 (parameter=seed)"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available when `stream=True`"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"shape": "a"}}, "shape", "has no field 'shape'"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}},
            "response_format",
            "together",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"cache_salt": ""}, "cache_salt", "must not be empty"),
        ({"priority": 2**63}, "priority", "less than 2"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
        ({"truncation_side": "up"}, "truncation_side", "must be one of left, right"),
        ({"vllm_xargs": [1]}, "vllm_xargs", "must be an object"),
        ({"repetition_detection": {"min_count": -1}}, "repetition_detection.min_count", "at least 0"),
    ],
)
def test_a_wrong_completion_request_names_the_field(change: dict[str, Any], param: str, match: str) -> None:
    server = make_server(max_prompts=4)
    refusal(server.post(COMPLETIONS, {"prompt": "Hi", **change}), param=param, match=match)
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("change", "param", "match"),
    [
        ({"messages": None}, "messages", "the field 'messages' is missing"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": ["Hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "must be a string, got NoneType"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "must be a string, got int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url' are not supp"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text as 'text'"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "must be text, or an object"),
        ({"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set to true"),
        ({"logprobs": 2}, "logprobs", "must be True or False"),
        ({"logprobs": True, "top_logprobs": "x"}, "top_logprobs", "must be an int"),
        ({"tools": [{}]}, "tools", "a tool must be"),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools have the same name"),
        (
            {"tools": [TOOL]},
            "tool_choice",
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
        ),
        ({"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "Invalid value for `tool_choice`"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice", "must be an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice must be"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            *("tool_choice", "a function that is not in tools"),
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            *("tool_choice", "together with structured_outputs"),
        ),
        ({"chat_template": "{{ x }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "must be an object, got list"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "variable 'chat_template'"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "cannot have the variable 'tools'"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "cannot have the variable 'bos_token'"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "cannot have the variable 'a b'"),
        ({"chat_template_kwargs": {"a": nested(64)}}, "chat_template_kwargs", "expected at most 64 levels"),
        (
            {"chat_template_kwargs": {"a": "x" * 2**18}},
            "chat_template_kwargs",
            "262153 bytes long; the limit is 262144",
        ),
        ({"chat_template_kwargs": {"a": [2**63]}}, "chat_template_kwargs", "integers must be from"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs", "at most 64 variables"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of none, minimal"),
        ({"add_special_tokens": True}, "add_special_tokens", "the chat template writes special tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            *("continue_final_message", "Cannot set both"),
        ),
    ],
)
def test_a_wrong_chat_request_names_the_field(change: dict[str, Any], param: str, match: str) -> None:
    server = make_server()
    refusal(server.post(CHAT_PATH, {"messages": CHAT, **change}), param=param, match=match)
    assert not server.engine.requests


def test_a_template_from_a_request_is_never_a_path() -> None:
    server = make_server(trust_request_chat_template=True)
    answer = server.post(CHAT_PATH, {"messages": CHAT, "chat_template": "/etc/passwd"})
    refusal(answer, param="chat_template", match="is not a Jinja template")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        (COMPLETIONS, {"prompt": "Hi", "model": "x"}, 404, "NotFoundError", "model"),
        (CHAT_PATH, {"messages": CHAT, "model": "x"}, 404, "NotFoundError", "model"),
        (CHAT_PATH, {"messages": CHAT, "documents": [{}]}, 501, "NotImplementedError", "documents"),
        (COMPLETIONS, {"prompt": "Hi", "truncation_side": "right"}, 501, "NotImplementedError", None),
        ("/v1/embeddings", {"input": "Hi", "model": "x"}, 404, "NotFoundError", "model"),
        ("/v1/embeddings", {"input": "Hi", "dimensions": 8}, 400, "BadRequestError", "dimensions"),
        ("/v1/embeddings", {"input": "Hi", "pooling": "max"}, 400, "BadRequestError", "pooling"),
        ("/v1/embeddings", {"input": ""}, 400, "BadRequestError", "input"),
        ("/v1/embeddings", {}, 400, "BadRequestError", "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, 400, "BadRequestError", "encoding_format"),
        ("/tokenize", {}, 400, "BadRequestError", "prompt"),
        ("/tokenize", {"messages": []}, 400, "BadRequestError", "messages"),
        ("/tokenize", {"prompt": "Hi", "model": "x"}, 404, "NotFoundError", "model"),
        ("/detokenize", {"tokens": [1000]}, 400, "BadRequestError", "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "BadRequestError", "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "BadRequestError", "tokens"),
    ],
)
def test_other_refusals(path: str, body: Any, status: int, kind: str, param: str | None) -> None:
    refusal(make_server().post(path, body), status, kind, param)


def test_the_message_for_an_unknown_model_is_openais() -> None:
    answer = make_server().post(COMPLETIONS, {"prompt": "Hi", "model": "x"})
    assert answer.error["message"] == "The model `x` does not exist."
    for absent in ("", None):
        assert make_server().post(COMPLETIONS, {"prompt": "Hi", "model": absent}).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON value"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is not a JSON value"),
        (b'{"prompt": "a", "temperature": 1e999}', "1e999 is out of range"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}", f"at most {MAX_NESTING} levels"),
        (b'{"prompt": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_must_be_json(raw: bytes, match: str) -> None:
    refusal(make_server().post(COMPLETIONS, raw=raw), match=match)


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = MAX_NESTING - 1
    refusal(make_server().post(COMPLETIONS, raw=b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"), param="prompt")


def test_the_content_type_must_be_json() -> None:
    server = make_server()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.call("POST", COMPLETIONS, b'{"prompt": "Hi"}', {"content-type": kind})
        refusal(answer, match="only 'application/json' is allowed")
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.call("POST", COMPLETIONS, b'{"prompt": "Hi"}', headers).status == 200


@pytest.mark.parametrize("headers", [{}, {"content_length": "3000"}, {"content_length": "9" * 5000}])
def test_a_body_may_be_too_long(headers: dict[str, Any]) -> None:
    server = make_server(max_request_bytes=2000)
    answer = server.post(COMPLETIONS, {"prompt": "x" * 2000}, **headers)
    refusal(answer, 413, "RequestTooLargeError", match="at most 2000 bytes")
    assert "connection" not in answer.headers  # the rest is read, so that the answer arrives


def test_a_body_that_waits_for_a_go_ahead_is_refused_before_it_comes() -> None:
    server = make_server(max_request_bytes=2000)
    answer = server.post(COMPLETIONS, {"prompt": "Hi"}, content_length="3000", expect="100-continue")
    refusal(answer, 413, "RequestTooLargeError", match="at most 2000 bytes")
    assert answer.headers["connection"] == "close"


def test_a_long_body_without_room_is_refused_before_it_comes() -> None:
    server = make_server(limit=1)
    connection = Connection("POST", COMPLETIONS, b"", {"content-type": "application/json", "content-length": "70000"})
    connection.give()

    async def main() -> None:
        with server.frontend.ledger.admit(ANYBODY):
            async with asyncio.timeout(20):
                await server.app(connection.scope, connection.receive, connection.send)

    asyncio.run(main())
    refusal(Answer(connection.sent), 429, "RateLimitError", match="queue full")


def test_options_that_ask_for_nothing_are_no_errors() -> None:
    server = make_server()
    assert server.post(COMPLETIONS, {"prompt": "Hi", "stream_options": {}}).status == 200
    assert server.post(COMPLETIONS, {"prompt": "Hi", "stream": True, "prompt_logprobs": 0}).status == 200
    assert server.engine.request.params.prompt_logprobs is None
    request = {"prompt": "Hi", "stream": True, "echo": True, "logprobs": 2, "prompt_logprobs": 0}
    assert server.post(COMPLETIONS, request).status == 200
    assert server.engine.request.params.prompt_logprobs == 2


@pytest.mark.parametrize("written", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_must_be_a_number_of_seconds(written: str) -> None:
    answer = make_server().post(COMPLETIONS, {"prompt": "Hi"}, X_Request_Timeout=written)
    refusal(answer, param="X-Request-Timeout", match="must be a number of seconds above 0")


ENGINE_ERRORS = [
    (RequestError("too long", parameter="input_tokens"), 400, "BadRequestError"),
    (RequestFailedError("it failed"), 500, "InternalServerError"),
    (OverloadedError("full", retry_after_s=2.5), 429, "RateLimitError"),
    (UnavailableError("draining"), 503, "ServiceUnavailableError"),
    (EngineDeadError("gone"), 503, "ServiceUnavailableError"),
    (DeadlineError("late"), 504, "TimeoutError"),
    (KeyError("secret of the inside"), 500, "InternalServerError"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "Hi"}), (CHAT_PATH, {"messages": CHAT})])
@pytest.mark.parametrize(("error", "status", "kind"), ENGINE_ERRORS)
def test_errors_of_the_engine_have_their_status(
    error: Exception, status: int, kind: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    server = make_server()
    server.engine.error = error
    answer = server.post(path, {**body, "stream": stream})
    refusal(answer, status, kind, getattr(error, "parameter", None))
    assert answer.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    assert "secret" not in answer.error["message"]
    assert server.frontend.ledger.num_in_flight == 0


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "Hi"}), (CHAT_PATH, {"messages": CHAT})])
@pytest.mark.parametrize(("error", "status", "kind"), ENGINE_ERRORS)
def test_an_error_behind_the_headers_is_an_event(
    error: Exception, status: int, kind: str, path: str, body: dict[str, Any]
) -> None:
    server = make_server(FakeEngine(["a", "b", "c"]))
    server.engine.error, server.engine.error_at = error, 1
    answer = server.post(path, {**body, "stream": True})
    assert answer.status == 200
    last = answer.events[-1]["error"]
    assert (last["type"], last["code"]) == (kind, status)
    assert "secret" not in last["message"]
    assert [event["choices"][0]["finish_reason"] for event in answer.events[:-1]] == [None] * (len(answer.events) - 1)


def test_a_sample_that_failed_is_an_error_of_the_request() -> None:
    server = make_server()
    server.engine.error = None

    class Failing(FakeEngine):
        def _outputs(self, request: Any, prompt: Any, ids: Any) -> Any:
            (output,) = super()._outputs(request, prompt, ids)
            output.error, output.outputs[0].finish_reason = "NaN logits", "error"
            return [output]

    refusal(make_server(Failing()).post(COMPLETIONS, {"prompt": "Hi"}), 500, "InternalServerError", match="NaN logits")


def test_a_prompt_that_fails_ends_the_others_of_its_batch() -> None:
    engine = FakeEngine(["a"] * 50)
    engine.fails_on = {"bad"}
    server = make_server(engine)
    request = {"prompt": ["good", "bad", "fine"], "stream": True, "max_tokens": 100}
    refusal(server.post(COMPLETIONS, request), param="prompt", match="this prompt fails")
    assert len(engine.ended) == len(engine.requests)
    refusal(server.post("/v1/embeddings", {"input": ["good", "bad"]}), param="input", match="this prompt fails")
    assert server.frontend.ledger.num_in_flight == 0


def test_what_is_too_much_is_refused_before_the_engine_sees_it() -> None:
    server = make_server(limit=5)
    request = {"prompt": ["a", "b"], "n": 3, "temperature": 1}
    refusal(server.post(COMPLETIONS, request), match="at most 5 sequences")
    with server.frontend.ledger.admit(server.frontend.authenticator.caller(None), 5):
        answer = server.post(COMPLETIONS, {"prompt": "a"})
        refusal(answer, 429, "RateLimitError", match="5 sequences in flight")
        assert answer.headers["retry-after"] == "1"
    server.frontend.ledger.close("the server is shutting down")
    refusal(server.post(COMPLETIONS, {"prompt": "a"}), 503, "ServiceUnavailableError", match="shutting down")
    assert not server.engine.requests


def test_fields_without_effect_are_named_in_a_header() -> None:
    server = make_server()
    given = {"prompt": "Hi", "user": "me", "guided_json": {}, "né\n": 1, "stream_options": {"x": 1}, "stream": True}
    answer = server.post(COMPLETIONS, given)
    assert answer.headers["x-jaxserve-unknown-fields"] == "user, guided_json, n%C3%A9%0A, stream_options.x"
    form = {"type": "json_object", "schema": {}}
    assert server.post(COMPLETIONS, {"prompt": "Hi", "response_format": form}).headers["x-jaxserve-unknown-fields"] == (
        "response_format.schema"
    )
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}, "x": 1}}
    assert server.post(COMPLETIONS, {"prompt": "Hi", "response_format": form}).headers["x-jaxserve-unknown-fields"] == (
        "response_format.json_schema.x"
    )
    many = server.post(COMPLETIONS, {"prompt": "Hi", **{f"x{i}{'y' * 100}": 1 for i in range(40)}})
    assert many.headers["x-jaxserve-unknown-fields"].endswith(", +8")
    assert len(many.headers["x-jaxserve-unknown-fields"]) < 32 * 70
    assert "x-jaxserve-unknown-fields" not in server.post(COMPLETIONS, {"prompt": "Hi"}).headers
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ):
        assert server.post(path, {**body, "zap": 1}).headers["x-jaxserve-unknown-fields"] == "zap"


def test_a_strict_server_refuses_unknown_fields() -> None:
    server = make_server(strict=True)
    answer = server.post(COMPLETIONS, {"prompt": "Hi", "temprature": 1})
    refusal(answer, param="temprature", match="unknown field 'temprature'; did you mean 'temperature'?")
    answer = server.post(COMPLETIONS, {"prompt": "Hi", "stream": True, "stream_options": {"include": True}})
    refusal(answer, param="include", match="did you mean 'include_usage'?")
    answer = server.post(COMPLETIONS, {"prompt": "Hi", "response_format": {"type": "json_object", "schema": {}}})
    refusal(answer, param="response_format.schema", match="unknown field 'response_format.schema'")
    accepted = server.post(CHAT_PATH, {"messages": CHAT, "user": "me", "store": True, "metadata": {}})
    assert accepted.headers["x-jaxserve-unknown-fields"] == "user, store, metadata"


def test_paths_and_methods_have_the_error_object_too() -> None:
    server = make_server()
    refusal(server.get("/v2/nothing"), 404, "NotFoundError")
    refusal(server.get("/v1/completions/"), 404, "NotFoundError")
    refusal(server.get("/v1/models/none/such"), 404, "NotFoundError", "model")
    answer = server.get(COMPLETIONS)
    refusal(answer, 405, "MethodNotAllowedError")
    assert answer.headers["allow"] == "POST"
    refusal(server.post("/health", {}), 405, "MethodNotAllowedError")


def routes(server: Server) -> list[tuple[str, str]]:
    """Method and path of every route."""
    found: list[tuple[str, str]] = []
    for route in server.app.routes:
        assert isinstance(route, Route), "a route of another kind: is it guarded?"
        path = route.path.replace("{model:path}", "tiny")
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


def auth_file(tmp_path: Path) -> str:
    """Keys with one scope each."""
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps([{"key": scope, "name": scope, "scopes": [scope]} for scope in ("generate", "metrics")]))
    return str(path)


def test_every_route_but_the_open_ones_needs_a_key(tmp_path: Path) -> None:
    server = make_server(auth_file=auth_file(tmp_path), enable_server_load_tracking=True)
    walked = routes(server)
    assert {("POST", COMPLETIONS), ("GET", "/metrics"), ("GET", "/load"), ("GET", "/v1/models/tiny")} <= set(walked)
    for method, path in [*walked, ("GET", "/nothing"), ("POST", "/v1/nothing")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic generate"}):
            answer = server.call(method, path, b"{}", {"content-type": "application/json", **headers})
            if path in OPEN_PATHS:
                assert answer.status == 200, path
                continue
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.error["type"] == "AuthenticationError"
                assert "wrong" not in answer.error["message"]
    assert not server.engine.requests


def test_a_key_opens_what_its_scopes_name(tmp_path: Path) -> None:
    server = make_server(auth_file=auth_file(tmp_path), enable_server_load_tracking=True)
    for method, path in routes(server):
        if path in OPEN_PATHS:
            continue
        scope = "metrics" if path in ("/metrics", "/load", "/status.json") else "generate"
        other = "generate" if scope == "metrics" else "metrics"
        headers = {"content-type": "application/json"}
        allowed = server.call(method, path, b"{}", {**headers, "authorization": f"Bearer {scope}"})
        assert allowed.status in (200, 400), path
        denied = server.call(method, path, b"{}", {**headers, "authorization": f"Bearer {other}"})
        refusal(denied, 403, "PermissionDeniedError", match=scope)
    refusal(server.get("/nothing", authorization="Bearer metrics"), 404, "NotFoundError")


def test_a_callers_own_salt_is_not_the_engines(tmp_path: Path) -> None:
    server = make_server(api_key=["one", "two"])
    salts = set[Any]()
    for key in ("one", "two"):
        server.post(COMPLETIONS, {"prompt": "Hi", "cache_salt": "s"}, authorization=f"bearer {key}")
        salts.add(server.engine.request.cache_salt)
    assert len(salts) == 2 and "s" not in salts


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 2**31, 2**63, 2**64, -(2**63), 0.5, 1e300, 3.0])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "auto", "required", "json_object", "left", "text", "none"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "prompt messages model n temperature top_p top_k min_p seed stop stop_token_ids max_tokens min_tokens logprobs"
    " top_logprobs prompt_logprobs echo suffix best_of stream stream_options logit_bias allowed_token_ids bad_words"
    " structured_outputs response_format tools tool_choice parallel_tool_calls chat_template_kwargs reasoning_effort"
    " truncate_prompt_tokens priority cache_salt vllm_xargs repetition_detection thinking_token_budget user documents"
    " input encoding_format pooling normalize dimensions tokens request_id return_token_ids logprob_token_ids"
    " add_generation_prompt continue_final_message presence_penalty repetition_penalty min_tokens detokenize"
).split()
STARTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT_PATH: {"messages": CHAT, "tools": [TOOL]},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}


@given(
    path=st.sampled_from(sorted(STARTS)),
    change=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), JSON, max_size=5),
    is_strict=st.booleans(),
)
def test_no_body_gives_a_5xx(path: str, change: dict[str, Any], is_strict: bool) -> None:
    engine, parsers = FakeEngine(["a", "b"]), ParserNames("qwen3", "hermes")
    server = make_server(engine, parsers=parsers, enable_auto_tool_choice=True, strict=is_strict)
    answer = server.post(path, {**STARTS[path], **change})
    if answer.status == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert not any("error" in event for event in answer.events)
        else:
            answer.json()
    else:
        assert answer.status in (400, 404, 501), answer.body
        assert answer.error["message"]
    assert server.frontend.ledger.num_in_flight == 0
