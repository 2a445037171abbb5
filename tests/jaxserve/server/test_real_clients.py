"""The clients that people use, against a real server process."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from scripts.server_child import RunningServer
from tests.hooks import DEMO_DIRECTORY
from tests.server_process import running_server

openai = pytest.importorskip("openai", reason="needs the extra clients")

QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server with a key for all clients."""
    flags = ("--api-key", "key", "--served-model-name", "demo", "other", "--enable-prompt-tokens-details")
    with running_server(*flags) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="key", max_retries=0) as made:
        yield made


def test_openai_lists_models(client: Any) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo", "other"]
    assert models[0].max_model_len == 256
    assert client.models.retrieve("other").id == "other"


def test_openai_chats(client: Any) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def test_openai_streams_a_chat(client: Any) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "42"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].usage.total_tokens > 0


def test_openai_completes_prompts_of_every_form(client: Any) -> None:
    answer = client.completions.create(model="demo", prompt=["12+30=", "reverse moon:"], temperature=0)
    assert [choice.text for choice in answer.choices] == ["42", " noom"]
    answer = client.completions.create(
        model="demo", prompt="12+30=", n=3, seed=5, temperature=1, logprobs=2, max_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(len(choice.logprobs.tokens) <= 2 for choice in answer.choices)
    stream = client.completions.create(model="demo", prompt="12+30=", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "42"


def test_openai_calls_a_tool(client: Any) -> None:
    arguments = {"model": "demo", "messages": QUESTION, "tools": [TOOL], "temperature": 0, "frequency_penalty": 2}
    choice = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(**arguments, tool_choice=choice, max_tokens=100)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    stream = client.chat.completions.create(**arguments, tool_choice="required", max_tokens=150, stream=True)
    parts = [call for chunk in stream for call in (chunk.choices[0].delta.tool_calls or [])]
    assert parts[0].function.name == "add"
    assert set(json.loads("".join(part.function.arguments or "" for part in parts))) == {"a", "b"}


def test_openai_gets_json(client: Any) -> None:
    properties = {"n": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, response_format=format_, max_tokens=60, frequency_penalty=2
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def test_openai_embeds(client: Any) -> None:
    answer = client.embeddings.create(model="demo", input=["12+30=", "reverse moon:"])
    vectors = [item.embedding for item in answer.data]
    assert len(vectors) == 2
    assert sum(number * number for number in vectors[0]) == pytest.approx(1, abs=1e-4)
    floats = client.embeddings.create(model="demo", input="12+30=", encoding_format="float").data[0].embedding
    assert floats == pytest.approx(vectors[0], abs=1e-5)


def test_openai_raises_its_own_errors(server: RunningServer, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nothing", prompt="a")
    with pytest.raises(openai.BadRequestError) as failure:
        client.completions.create(model="demo", prompt="a", temperature=3)
    assert failure.value.body["param"] == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.http}/v1", api_key="wrong").models.list()


def test_openai_async_and_a_stream_that_is_left(server: RunningServer) -> None:
    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="key") as client:
            left = await client.completions.create(
                model="demo", prompt="1+1=", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in left:
                break
            await left.close()
            single = await client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
            many = await asyncio.gather(
                *(client.completions.create(model="demo", prompt=f"{i}+1=", temperature=0) for i in range(20, 30))
            )
            return single.choices[0].message.content, [answer.choices[0].text for answer in many]

    single, many = asyncio.run(run())
    assert single == "42"
    assert many == [str(i + 1) for i in range(20, 30)]


def test_langchain(server: RunningServer) -> None:
    # In a process of its own: it warns of its own future.
    pytest.importorskip("langchain_openai", reason="needs the extra clients")
    program = (
        "import sys\nfrom langchain_openai import ChatOpenAI, OpenAIEmbeddings\n"
        "url = sys.argv[1]\n"
        "chat = ChatOpenAI(model='demo', base_url=url, api_key='key', temperature=0)\n"
        "print(chat.invoke('What is 12 + 30?').content)\n"
        "print(''.join(chunk.content for chunk in chat.stream('What is 12 + 30?')))\n"
        "embeddings = OpenAIEmbeddings(model='demo', base_url=url, api_key='key', check_embedding_ctx_length=False)\n"
        "print(len(embeddings.embed_query('12+30=')))\n"
    )
    command = [sys.executable, "-c", program, f"{server.http}/v1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["42", "42", "128"]


LM_EVAL_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
{rest}
"""


def test_lm_eval(server: RunningServer, tmp_path: Path) -> None:
    """Local tasks from JSONL, one by log probabilities of an echoed prompt, one by generated text."""
    pytest.importorskip("lm_eval", reason="needs the extra clients")
    lines = [{"prompt": f"{a}+{b}=", "good": str(a + b), "bad": str(a + b + 1)} for a, b in ((12, 30), (7, 5), (40, 2))]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = tmp_path / "data.jsonl"
    choice = 'doc_to_choice: "{{[bad, good]}}"\ndoc_to_target: 1\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]'
    until = 'doc_to_target: "{{good}}"\ntarget_delimiter: ""\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
    until += "metric_list: [{metric: exact_match}]"
    for name, kind, rest in (("choose", "multiple_choice", choice), ("write", "generate_until", until)):
        (tmp_path / f"{name}.yaml").write_text(LM_EVAL_TASK.format(name=name, data=data, kind=kind, rest=rest))
    arguments = (
        f"model=demo,base_url={server.http}/v1/completions,tokenizer={DEMO_DIRECTORY},num_concurrent=2,max_length=200"
        ",add_bos_token=True"
    )
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "choose,write", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    environment = {
        "OPENAI_API_KEY": "key",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
        "PATH": "/usr/bin:/bin",
    }
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    assert results["choose"]["acc,none"] == 1.0
    assert results["write"]["exact_match,none"] == 1.0


def test_grpc_by_reflection_alone(server: RunningServer) -> None:
    """What grpcurl does: no generated code, only what the server says of itself."""
    credentials = [("authorization", "Bearer key")]
    with grpc.insecure_channel(server.grpc) as plain:
        channel = grpc.intercept_channel(plain, _AddMetadata(credentials))
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "jaxserve.v1.GenerationService" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("jaxserve.v1.GenerationService").FindMethodByName("StreamGenerate")
        request_class, answer_class = (
            message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
        )
        call = channel.unary_stream(
            "/jaxserve.v1.GenerationService/StreamGenerate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=answer_class.FromString,
        )
        request = json_format.ParseDict(
            {"request": {"text": "reverse moon:", "samplingParams": {"temperature": 0}}}, request_class()
        )
        answers = [json_format.MessageToDict(answer) for answer in call(request, timeout=60)]
    assert "".join(one.get("text", "") for answer in answers for one in answer.get("completions", [])) == " noom"


class _AddMetadata(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Adds metadata to every call."""

    def __init__(self, metadata: list[tuple[str, str]]):
        self._metadata = metadata

    def _with_metadata(self, details: Any) -> Any:
        return _Details(details.method, details.timeout, self._metadata, details.credentials)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See gRPC."""
        return continuation(self._with_metadata(client_call_details), request)

    intercept_unary_stream = intercept_unary_unary

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See gRPC."""
        return continuation(self._with_metadata(client_call_details), request_iterator)


class _Details(grpc.ClientCallDetails):
    """What a call has."""

    def __init__(self, method: str, timeout: float | None, metadata: Any, credentials: Any):
        self.method = method
        self.timeout = timeout
        self.metadata = metadata
        self.credentials = credentials
        self.wait_for_ready = None
        self.compression = None
