"""A numeric sampling option is added as CONTRIBUTING.md says, in a copy of the package, and asked for from outside."""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from jaxserve.server.proto.jaxserve.v1 import sampling_pb2
from scripts.server_child import RunningServer
from tests.server_process import running_server

REPOSITORY = Path(__file__).resolve().parent.parent

PLACES: Mapping[str, tuple[str, str]] = {
    "jaxserve/api/sampling_params.py": (
        "    seed: int | None = None\n",
        '    even_bias: float = 0.0\n    """Added to the logits of even token ids, in [-99, 99]."""\n',
    ),
    "jaxserve/api/sampling_options.py": (
        '        "repetition_penalty": Samp',
        '        "even_bias": SamplingOption(0.0, functools.partial(number, low=-99.0, high=99.0), Effect.LOGITS),\n',
    ),
    "jaxserve/sampling/penalties.py": (
        "    if processors:\n        whole = apply_processors(",
        "    logits = logits + inputs.options.even_bias[:, None] * (jnp.arange(logits.shape[1]) % 2 == 0)\n",
    ),
    "jaxserve/server/proto/jaxserve/v1/sampling.proto": (
        "}\n\n// A list of token ids, so that",
        "  // Added to the logits of even token ids, in [-99, 99].\n  optional double even_bias = 30;\n",
    ),
}
"""Everything that is written by hand: before which text of which file, and what."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that runs the copy with the option."""
    root = tmp_path_factory.mktemp("option")
    shutil.copytree(
        REPOSITORY / "jaxserve", root / "jaxserve"
    )  # with its bytecode, which Python compares with the files
    for name, (before, written) in PLACES.items():
        text = (root / name).read_text()
        assert text.count(before) == 1, f"{name} no longer has one {before!r}"
        (root / name).write_text(text.replace(before, written + before))
    generate_protocol(root / "jaxserve/server/proto/jaxserve/v1/sampling_pb2.py")
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((str(root), str(REPOSITORY)))}


def generate_protocol(module: Path) -> None:
    """Writes what ``scripts/make_protos.sh``, which needs a network, makes of the message with one field more."""
    old = sampling_pb2.DESCRIPTOR.serialized_pb
    file = descriptor_pb2.FileDescriptorProto.FromString(old)
    message = next(message for message in file.message_type if message.name == "SamplingParams")
    message.field.add(
        name="even_bias",
        number=30,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        proto3_optional=True,
        oneof_index=len(message.oneof_decl),
    )
    message.oneof_decl.add(name="_even_bias")
    head, _, rest = module.read_text().partition("AddSerializedFile(")
    module.write_text(f"{head}AddSerializedFile({file.SerializeToString()!r})\n{rest.partition(chr(10))[2]}")


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[RunningServer]:
    """The copy's server of the demo model."""
    with running_server(environment=environment) as running:
        yield running


def complete(server: RunningServer, **fields: Any) -> list[int]:
    """Greedy tokens over HTTP."""
    body = {"prompt": "reverse moon:", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    request = urllib.request.Request(
        f"{server.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def program(text: str, environment: Mapping[str, str]) -> Any:
    """What a program prints as JSON, run with the copy."""
    command = [sys.executable, "-c", f"import json\n{text}"]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_contributing_names_the_places() -> None:
    assert len(PLACES) <= 4
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text()
    recipe = guide.partition("### Add a sampling option")[2].partition("\n### ")[0]
    assert all(name in recipe for name in PLACES)


def test_it_changes_tokens_over_http_and_grpc(server: RunningServer, environment: dict[str, str]) -> None:
    """HTTP's front end hands it to the engine's process, which plans with it; requests without it are as they were."""
    usual = complete(server)
    even = complete(server, even_bias=99)
    assert usual != even and any(token % 2 for token in usual) and not any(token % 2 for token in even)
    assert complete(server, even_bias=0) == usual == complete(server)
    client = f"""
from jaxserve.client import Client
with Client({server.grpc!r}) as client:
    usual = {{"temperature": 0, "ignore_eos": True}}
    found = [client.generate("reverse moon:", {{**usual, "even_bias": bias}}) for bias in (0, 99)]
print(json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""
    assert program(client, environment) == [usual, even]


def test_it_is_checked(server: RunningServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        complete(server, even_bias=100)
    assert raised.value.code == 400
    assert "even_bias must be in [-99, 99], got 10" in raised.value.read().decode()


def test_rows_of_one_batch_differ_and_the_command_has_a_flag(environment: dict[str, str]) -> None:
    found = program(
        """
import argparse
from jaxserve import LLM, SamplingParams
from jaxserve.cli_arguments import add_sampling_arguments, sampling_arguments
parser = argparse.ArgumentParser()
add_sampling_arguments(parser)
asked = sampling_arguments(parser.parse_args("--temperature 0 --even-bias 99 --ignore-eos".split()))
usual = SamplingParams(temperature=0, ignore_eos=True)
llm = LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
alone = llm.generate("reverse moon:", usual, use_tqdm=False)
both = llm.generate(["reverse moon:"] * 2, [usual, asked], use_tqdm=False)
print(json.dumps([list(one.outputs[0].token_ids) for one in [*alone, *both]]))
""",
        environment,
    )
    alone, usual, even = found
    assert usual == alone != even and not any(token % 2 for token in even)
