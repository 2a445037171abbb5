"""The protocol: what its files must keep to, and that the code knows all of it."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, ServiceDescriptor
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.outputs import CompletionOutput, FinishReason
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams
from jaxserve.engine.resharding import ReshardReport
from jaxserve.server import proto_codec
from jaxserve.server.proto.jaxserve.v1 import sampling_pb2
from jaxserve.server.proto_codec import completion_from_proto, completion_to_proto, given_fields, params_to_proto
from tests.conftest import REPOSITORY

PROTO_ROOT = REPOSITORY / "jaxserve" / "server" / "proto"
FILES = sorted(PROTO_ROOT.rglob("*.proto"))


def descriptor_of(path: Path) -> FileDescriptor:
    """What the module made of a file describes."""
    name = ".".join(path.relative_to(PROTO_ROOT).with_suffix("").parts)
    return import_module(f"jaxserve.server.proto.{name}_pb2").DESCRIPTOR


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    """All messages of a file but those that stand for map entries."""
    waiting: list[Descriptor] = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        if not message.GetOptions().map_entry:
            yield message
            waiting += message.nested_types


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    """All enums of a file."""
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


def services(file: FileDescriptor) -> Iterator[ServiceDescriptor]:
    """All services of a file."""
    yield from file.services_by_name.values()


def test_the_files_are_seen() -> None:
    assert len(FILES) == 6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_style_of_a_file(path: Path) -> None:
    """Rules of buf's lint category STANDARD, and comments on everything."""
    file = descriptor_of(path)
    assert file.package == ".".join(path.parent.relative_to(PROTO_ROOT).parts)
    assert re.search(r"\.v\d+$", file.package) and re.fullmatch(r"[a-z_]+\.proto", path.name)
    for message in messages(file):
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", message.name)
        for field in message.fields:
            assert re.fullmatch(r"[a-z]+[a-z0-9_]*", field.name) and "__" not in field.name, field.full_name
    for enum in enums(file):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
        assert all(value.name.startswith(prefix) for value in enum.values), enum.full_name
        assert (enum.values[0].name, enum.values[0].number) == (f"{prefix}UNSPECIFIED", 0)
    for service in services(file):
        assert service.name.endswith("Service")


def test_every_method_has_messages_of_its_own() -> None:
    used: list[str] = []
    for path in FILES:
        for service in services(descriptor_of(path)):
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"
                used += [method.input_type.full_name, method.output_type.full_name]
    assert used and len(set(used)) == len(used)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_everything_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("//")
    for number, line in enumerate(lines):
        if re.match(r"\s*(message|enum|service|rpc|oneof)\b|\s*(optional |repeated )?[\w.<>, ]+ \w+ = \d+;", line):
            before = lines[number - 1].strip()
            assert before.startswith("//"), f"{path.name}:{number + 1}: {line.strip()}"


def test_request_messages_hold_no_any_and_no_recursion() -> None:
    """``Any`` and ``Struct`` open ways to make parsing expensive."""
    for path in FILES:
        for name in descriptor_of(path).dependencies:
            assert name.name.startswith("jaxserve/v1/")
    for path in FILES:
        for message in messages(descriptor_of(path)):
            assert message not in below(message), message.full_name


def below(message: Descriptor) -> set[Descriptor]:
    """Types of all messages in a message."""
    found: set[Descriptor] = set()
    waiting = [message]
    while waiting:
        for field in waiting.pop().fields:
            if field.message_type is not None and field.message_type not in found:
                found.add(field.message_type)
                waiting.append(field.message_type)
    return found


def test_the_generated_modules_are_those_of_the_files() -> None:
    """By their names and types: tools to make them again are not at hand where tests run."""
    for path in FILES:
        file = descriptor_of(path)
        written = re.sub(r"//.*", "", path.read_text())
        assert set(re.findall(r"\bmessage (\w+)", written)) == {message.name for message in messages(file)}
        assert set(re.findall(r"\brpc (\w+)", written)) == {
            method.name for service in services(file) for method in service.methods
        }
        fields = {(name, int(number)) for name, number in re.findall(r"(\w+) = (\d+);", written)}
        known = {(field.name, field.number) for message in messages(file) for field in message.fields}
        known |= {(value.name, value.number) for enum in enums(file) for value in enum.values}
        assert fields == known


def test_generated_code_runs_with_the_oldest_versions_that_we_declare() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    matched = (re.fullmatch(r"((?:grpcio|protobuf)[a-z-]*)>=([0-9.]+),.*", one) for one in declared)
    floors = {found[1]: found[2] for found in matched if found is not None}
    assert set(floors) == {"grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf"}
    versions: dict[str, set[str]] = {"protobuf": set(), "grpcio": set()}
    for path in PROTO_ROOT.rglob("*_pb2*.py"):
        text = path.read_text()
        versions["protobuf"] |= set(re.findall(r"^# Protobuf Python Version: ([\d.]+)", text, re.MULTILINE))
        versions["grpcio"] |= set(re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'", text, re.MULTILINE))
    for name, found in versions.items():
        assert found, name
        for version in found:
            assert as_numbers(version) <= as_numbers(floors[name]), (name, version)


def as_numbers(version: str) -> tuple[int, ...]:
    """A version to compare."""
    return tuple(map(int, version.split(".")))


def test_sampling_parameters_are_pythons() -> None:
    public = {field.removesuffix("_json") for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    python = {field.name for field in dataclasses.fields(SamplingParams)}
    assert public == python - set(proto_codec.PYTHON_FIELDS)
    structure = sampling_pb2.StructuredOutputs.DESCRIPTOR.fields_by_name
    assert set(structure) == {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    repetition = sampling_pb2.RepetitionDetection.DESCRIPTOR.fields_by_name
    assert set(repetition) == {field.name for field in dataclasses.fields(RepetitionDetectionParams)}
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, f"{field.name}: zero and nothing would be the same"


def test_every_field_is_known_to_the_code() -> None:
    """A field that nothing names would be accepted and ignored."""
    folders = [REPOSITORY / "jaxserve" / "server", REPOSITORY / "jaxserve" / "client"]
    code = [path.read_text() for folder in folders for path in folder.rglob("*.py") if "_pb2" not in path.name]
    names = set(re.findall(r"\w+", "\n".join(code)))
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}  # read in a loop over the dataclass
    sampling |= {field.name for field in dataclasses.fields(RepetitionDetectionParams)}
    sampling |= {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    sampling |= {field.name for field in dataclasses.fields(ReshardReport)}  # sent whole
    for path in FILES:
        for message in messages(descriptor_of(path)):
            unknown = {field.name for field in message.fields} - names - sampling
            assert not unknown, f"{message.full_name}: {sorted(unknown)}"


def test_modules_of_the_protocol_need_no_jax() -> None:
    code = "import jaxserve.server.proto.jaxserve.v1.generation_pb2_grpc, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4, unique=True)
SMALL = st.integers(0, 100)
STRUCTURES = st.one_of(
    st.builds(lambda text: {"choice": [text]}, TEXTS),
    st.just({"regex": "a+", "whitespace_pattern": " *"}),
    st.just({"json": {"type": "object"}, "disable_any_whitespace": True}),
    st.just({"json_object": True, "disable_additional_properties": True}),
    st.just({"grammar": "start: 'a'"}),
    st.just({"structural_tag": "{}"}),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 50),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "temperature": st.floats(0.02, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 1000),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.lists(TEXTS, max_size=3),
    "stop_token_ids": TOKEN_IDS,
    "ignore_eos": st.booleans(),
    "max_tokens": st.one_of(st.none(), st.integers(50, 2**40)),
    "min_tokens": st.integers(0, 16),
    "logprobs": st.integers(-1, 20),
    "prompt_logprobs": st.integers(-1, 20),
    "detokenize": st.just(True),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "structured_outputs": STRUCTURES,
    "logit_bias": st.dictionaries(SMALL, st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(SMALL, min_size=1, max_size=4, unique=True),
    "bad_words": st.lists(TEXTS, max_size=3),
    "thinking_token_budget": st.integers(0, 1000),
    "repetition_detection": st.just({"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}),
    "skip_reading_prefix_cache": st.booleans(),
    "extra_args": st.dictionaries(TEXTS, st.one_of(SMALL, TEXTS, st.booleans()), max_size=3),
}


def test_the_round_trip_below_has_all_fields() -> None:
    left_out = {"logprob_token_ids"}  # excludes others; below it has a test of its own
    assert set(FIELDS) | left_out == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {
        "extra_args_json"
    } | {"extra_args"}


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_parameters_survive_the_way_there_and_back(values: dict[str, Any]) -> None:
    if "prompt_logprobs" in values:
        values.pop("skip_reading_prefix_cache", None)
    params = SamplingParams(**values)
    message = params_to_proto(params)
    read = SamplingParams(**given_fields(sampling_pb2.SamplingParams.FromString(message.SerializeToString())))
    assert comparable(read) == comparable(params)


def comparable(params: SamplingParams) -> dict[str, Any]:
    """All fields; a schema, which may come back as its text, as text."""
    found = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    structure = params.structured_outputs
    if structure is not None and structure.json is not None and not isinstance(structure.json, str):
        changed = {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
        found["structured_outputs"] = StructuredOutputsParams(**{**changed, "json": json.dumps(dict(structure.json))})
    return found


def test_tokens_to_give_logprobs_of_survive_too() -> None:
    params = SamplingParams(logprob_token_ids=[3, 1])
    assert SamplingParams(**given_fields(params_to_proto(params))) == params


def test_what_is_as_usual_is_not_sent() -> None:
    assert params_to_proto(SamplingParams()).ByteSize() == 0


@pytest.mark.parametrize("finish_reason", [None, "stop", "length", "abort"])
@pytest.mark.parametrize("stop_reason", [None, 0, 7, ".", ""])
def test_completions_survive_the_way_there_and_back(
    finish_reason: FinishReason | None, stop_reason: int | str | None
) -> None:
    sent = CompletionOutput(3, "a.", [0, 5], None, None, finish_reason, stop_reason)
    assert completion_from_proto(completion_to_proto(sent)) == sent
