"""Conversations, tokenizer, models and operation over gRPC."""

import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.resharding import ReshardReport
from jaxserve.parsers import ParserNames
from jaxserve.server.auth import Caller
from jaxserve.server.proto.jaxserve.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    chat_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    sampling_pb2,
    tokenization_pb2,
    tokenization_pb2_grpc,
)
from tests.grpc_servers import MODEL, RESHARD_NUMBERS, connected, run, serving

Code = grpc.StatusCode
USER = chat_pb2.ChatMessage(role="user", content="Hi")
TOOL = chat_pb2.Tool(name="look", description="Looks.", parameters_json='{"type": "object", "properties": {}}')
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def test_a_conversation_in_openais_form_reaches_the_engine() -> None:
    asked = chat_pb2.ToolCall(id="c1", name="look", arguments='{"a": 1}')
    conversation = chat_pb2.Conversation(
        messages=[
            USER,
            chat_pb2.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[asked]),
            chat_pb2.ChatMessage(role="tool", content="4", tool_call_id="c1", name="look"),
        ],
        tools=[TOOL],
        tool_choice="none",
        chat_template_kwargs_json='{"b": [true, {"c": null}]}',
    )
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}

    async def main() -> None:
        async with serving(default_chat_template_kwargs={"a": 1, "b": 2}) as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(generation_pb2.GenerateRequest(messages=conversation))
            seen = there.engine.last
            assert seen.chat == {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "reasoning": "Hm.",
                        "tool_calls": [
                            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
                        ],
                    },
                    {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "look"},
                ],
                "tools": [{"type": "function", "function": function}],
                "add_generation_prompt": True,
                "continue_final_message": False,
                "chat_template_kwargs": {"a": 1, "b": [True, {"c": None}]},
            }
            assert seen.params.max_tokens is None and not seen.is_strict_length

    run(main)


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
    ],
)
def test_where_the_prompt_ends(fields: dict[str, Any], begins: bool, continues: bool) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            request = generation_pb2.GenerateRequest(messages=chat_pb2.Conversation(messages=[USER], **fields))
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            chat = there.engine.last.chat
            assert chat is not None
            assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (begins, continues)
            both = chat_pb2.Conversation(messages=[USER], add_generation_prompt=True, continue_final_message=True)
            with pytest.raises(grpc.aio.AioRpcError, match="Cannot set both") as refused:
                request = generation_pb2.GenerateRequest(messages=both)
                await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("include_reasoning", [None, False])
def test_answers_are_taken_apart(streams: bool, include_reasoning: bool | None) -> None:
    conversation = chat_pb2.Conversation(messages=[USER], tools=[TOOL], include_reasoning=include_reasoning)
    request = generation_pb2.GenerateRequest(messages=conversation)

    async def main() -> list[generation_pb2.Completion]:
        parsers = ParserNames(reasoning="qwen3", tools="hermes")
        async with serving(parsers, enable_auto_tool_choice=True) as there, connected(there.target) as channel:
            there.engine.texts = ["<think>Hm", ".</think>", "Well. ", CALL]
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            if not streams:
                return list((await stub.Generate(request)).completions)
            call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request))
            found = [one async for part in call for one in part.completions]
            assert there.engine.last.params.skip_special_tokens is False
            return found

    found = run(main)
    assert "".join(one.text for one in found) == f"<think>Hm.</think>Well. {CALL}"
    assert "".join(one.message.reasoning for one in found) == ("Hm." if include_reasoning is None else "")
    assert "".join(one.message.content for one in found).strip() == "Well."
    parts = [part for one in found for part in one.message.tool_calls]
    assert [part.name for part in parts if part.HasField("name")] == ["look"]
    assert [part.index for part in parts if part.HasField("id")] == [0]
    assert "".join(part.arguments for part in parts) == "{}"


def test_harmony_keeps_its_special_tokens() -> None:
    conversation = chat_pb2.Conversation(messages=[USER])
    params = sampling_pb2.SamplingParams(skip_special_tokens=True)

    async def main() -> generation_pb2.Completion:
        async with serving(ParserNames("openai_gptoss", "openai")) as there, connected(there.target) as channel:
            there.engine.texts = [
                "<|channel|>analysis<|message|>",
                "Hm.<|end|><|start|>",
                "<|channel|>final<|mess",
                "age|>Yes.",
            ]
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            answer = await stub.Generate(generation_pb2.GenerateRequest(messages=conversation, sampling_params=params))
            assert there.engine.last.params.skip_special_tokens is False
            return answer.completions[0]

    message = run(main).message
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("streams", [True, False])
def test_a_continued_message_and_a_call_inside_its_reasoning(streams: bool) -> None:
    started = chat_pb2.ChatMessage(role="assistant", content="<think>\nFirst")
    conversation = chat_pb2.Conversation(messages=[USER, started], tools=[TOOL], continue_final_message=True)
    request = generation_pb2.GenerateRequest(messages=conversation)

    async def main() -> list[generation_pb2.Completion]:
        parsers = ParserNames(reasoning="qwen3", tools="hermes")
        async with serving(parsers, enable_auto_tool_choice=True) as there, connected(there.target) as channel:
            there.engine.texts = [" I look.\n", CALL, "\n</think>", " Done."]
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            if not streams:
                return list((await stub.Generate(request)).completions)
            call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request))
            return [one async for part in call for one in part.completions]

    found = run(main)
    assert "".join(one.message.reasoning for one in found) == " I look.\n"
    assert "".join(one.message.content for one in found) == " Done."
    assert [part.name for one in found for part in one.message.tool_calls if part.HasField("name")] == ["look"]


def test_other_prompts_are_not_taken_apart() -> None:
    async def main() -> None:
        async with serving(ParserNames(reasoning="qwen3")) as there, connected(there.target) as channel:
            answer = await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                generation_pb2.GenerateRequest(text="Hi")
            )
            assert not answer.completions[0].HasField("message")

    run(main)


def test_a_tool_that_must_be_called() -> None:
    conversation = chat_pb2.Conversation(messages=[USER], tools=[TOOL], tool_choice="look")

    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.texts, there.engine.num_steps = ['{"a"', ": 1}"], 2
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            answer = await stub.Generate(generation_pb2.GenerateRequest(messages=conversation))
            structure = there.engine.last.params.structured_outputs
            assert structure is not None and structure.json == {"type": "object", "properties": {}}
            (call,) = answer.completions[0].message.tool_calls
            assert (call.name, call.arguments) == ("look", '{"a": 1}')
            both = sampling_pb2.SamplingParams(structured_outputs=sampling_pb2.StructuredOutputs(regex="a"))
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be given together"):
                await stub.Generate(generation_pb2.GenerateRequest(messages=conversation, sampling_params=both))
            auto = chat_pb2.Conversation(messages=[USER], tools=[TOOL])
            with pytest.raises(grpc.aio.AioRpcError, match="requires --enable-auto-tool-choice"):
                await stub.Generate(generation_pb2.GenerateRequest(messages=auto))

    run(main)


def test_tokens_and_texts() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = tokenization_pb2_grpc.TokenizationServiceStub(channel)
            found = await stub.Tokenize(tokenization_pb2.TokenizeRequest(text="ab", return_token_strings=True))
            assert (list(found.token_ids), list(found.token_strings)) == ([1, 97, 98], ["a", "b"])
            assert found.max_model_len == MODEL.max_model_len
            found = await stub.Tokenize(tokenization_pb2.TokenizeRequest(text="ab", add_special_tokens=False))
            assert (list(found.token_ids), list(found.token_strings)) == ([97, 98], [])
            ids = sampling_pb2.TokenIds(ids=[1, 97])
            text = await stub.Detokenize(tokenization_pb2.DetokenizeRequest(token_ids=ids))
            assert text.text == "\x01a"
            text = await stub.Detokenize(tokenization_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
            assert text.text == "a"
            with pytest.raises(grpc.aio.AioRpcError, match="expected token_ids"):
                await stub.Detokenize(tokenization_pb2.DetokenizeRequest())
            messages = chat_pb2.Conversation(messages=[USER, USER])
            prompt = await stub.ApplyChatTemplate(tokenization_pb2.ApplyChatTemplateRequest(messages=messages))
            assert (prompt.text, len(prompt.token_ids)) == ("Hi|Hi", 5)
            there.frontend.ledger.close("the server is shutting down")
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
                await stub.Tokenize(tokenization_pb2.TokenizeRequest(text="ab"))
            with pytest.raises(grpc.aio.AioRpcError, match="`x` does not exist"):
                await stub.Tokenize(tokenization_pb2.TokenizeRequest(text="ab", model="x"))

    run(main)


def test_models() -> None:
    async def main() -> None:
        async with serving(served_model_name=["small", "s"]) as there, connected(there.target) as channel:
            stub = model_pb2_grpc.ModelServiceStub(channel)
            listed = await stub.ListModels(model_pb2.ListModelsRequest())
            assert [one.id for one in listed.models] == ["small", "s"]
            for name, known in (("", "small"), ("s", "s")):
                model = (await stub.GetModel(model_pb2.GetModelRequest(model=name))).model
                assert (model.id, model.created) == (known, there.frontend.created_s)
                model.id, model.created = "", 0
                assert model == MODEL
            assert MODEL.id == ""
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.GetModel(model_pb2.GetModelRequest(model="fake"))
            assert failure.value.code() is Code.NOT_FOUND

    run(main)


def test_operation() -> None:
    async def main() -> None:
        async with serving(profile_dir="/profiles") as there, connected(there.admin_target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            load = await stub.GetLoad(admin_pb2.GetLoadRequest())
            assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (3, 5, 0.25)
            assert (load.num_in_flight, load.is_draining) == (0, False)
            await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert (await stub.StartProfile(admin_pb2.StartProfileRequest())).directory == "/profiles"
            assert (await stub.StopProfile(admin_pb2.StopProfileRequest())).directory == "/profiles"
            there.engine.running.add("grpc-1")
            ended = await stub.Abort(admin_pb2.AbortRequest(request_ids=["grpc-1", "grpc-2", "grpc"]))
            assert list(ended.aborted_request_ids) == ["grpc-1"]
            there.engine.running.clear()
            names = [name for name, _ in there.engine.calls]
            assert names == ["reset_prefix_cache", "start_profile", "stop_profile", "abort"]

    run(main)


def test_resharding() -> None:
    """The report has all that the engine tells, and the server admits as many sequences as now have room."""
    assert set(RESHARD_NUMBERS) < {field.name for field in dataclasses.fields(ReshardReport)}

    async def main() -> None:
        async with serving() as there, connected(there.admin_target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            report = await stub.Reshard(admin_pb2.ReshardRequest(mesh="tensor=2", layout="replicated"))
            assert [(axis.name, axis.size) for axis in report.to_mesh] == [("data", 1), ("tensor", 2)]
            assert [axis.size for axis in report.from_mesh] == [1, 1]
            assert (report.from_layout, report.to_layout) == ("tensor_parallel", "replicated")
            assert [getattr(report, name) for name in RESHARD_NUMBERS] == [*range(1, len(RESHARD_NUMBERS) + 1)]
            ledger, num_seqs = there.frontend.ledger, MODEL.max_num_seqs
            with pytest.raises(RequestError, match=f"at most {5 * num_seqs} sequences"):
                with ledger.admit(Caller("someone", frozenset()), 5 * num_seqs + 1):
                    pass
            ledger.close("draining")
            await stub.Reshard(admin_pb2.ReshardRequest())
            assert not ledger.is_open
            assert there.engine.calls == [("reshard", ("tensor=2", "replicated")), ("reshard", (None, None))]

    run(main)


def test_draining() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.admin_target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            await stub.Drain(admin_pb2.DrainRequest())
            await stub.Drain(admin_pb2.DrainRequest(timeout_s=0))
            assert there.drains == [None, 0.0]
            for wrong in (-1.0, float("nan"), float("inf")):
                with pytest.raises(grpc.aio.AioRpcError, match="timeout_s must be a finite number of seconds"):
                    await stub.Drain(admin_pb2.DrainRequest(timeout_s=wrong))
            there.frontend.ledger.close("the server is shutting down")
            assert (await stub.GetLoad(admin_pb2.GetLoadRequest())).is_draining

    run(main)


def test_profiles_need_a_folder() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.admin_target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            for method, request in (
                (stub.StartProfile, admin_pb2.StartProfileRequest()),
                (stub.StopProfile, admin_pb2.StopProfileRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="started without --profile-dir") as failure:
                    await method(request)
                assert failure.value.code() is Code.UNIMPLEMENTED
            assert there.engine.calls == []

    run(main)
