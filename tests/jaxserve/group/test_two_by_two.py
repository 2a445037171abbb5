"""Two processes with two CPU devices each, over HTTP and gRPC: the answers of one process with four devices."""

import contextlib
import csv
import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.client import Client
from scripts.server_child import RunningServer
from tests.free_ports import free_ports
from tests.group_server import (
    PROMPTS,
    answers,
    assert_same,
    expected_answers,
    grpc_answers,
    post,
    running_group,
    secret_flags,
    text_of,
)
from tests.jaxserve.group.test_group_meshes import SHAPES
from tests.launched_server import started
from tests.random_checkpoint import write_checkpoint_with_tokenizer
from tests.server_process import PROGRAMS_CACHE, SMALL_ENGINE, running_server

pytestmark = pytest.mark.slow
ENGINE = ("--dtype", "float32", "--compilation-cache-dir", str(PROGRAMS_CACHE), *SMALL_ENGINE)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}
PHONE: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 12,
    "max_tokens": 20,
    "structured_outputs": {"regex": r"\d{3}-\d{4}"},
}
NUM_REQUESTS = 150
SCALE = 8
CONTEXT = 512
NUM_STORY_TOKENS = 200


@contextlib.contextmanager
def launched(mesh: str, folder: Path) -> Iterator[RunningServer]:
    """By ``jaxserve launch``."""
    del folder
    with running_group("--mesh", mesh, "--dtype", "float32") as server:
        yield server


@contextlib.contextmanager
def one_by_one(mesh: str, folder: Path) -> Iterator[RunningServer]:
    """By ``--nnodes`` and ``--node-rank``."""
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_ports()), *secret_flags(folder))
    flags = ("--nnodes", "2", *place, "--mesh", mesh, *ENGINE)
    with started((), folder / "log", *flags, "--node-rank", "1", "--headless") as follower:
        with running_server(*flags, "--node-rank", "0") as server:
            yield server
            server.process.send_signal(signal.SIGTERM)
            assert (server.wait(), follower.wait(20)) == (0, 0)


@pytest.mark.parametrize("launcher", [launched, one_by_one])
@pytest.mark.parametrize("mesh", ["tensor=4", "stage=2,tensor=2", "stage=4"])
def test_they_answer_as_one_process(
    launcher: Callable[[str, Path], contextlib.AbstractContextManager[RunningServer]], mesh: str, tmp_path: Path
) -> None:
    with launcher(mesh, tmp_path) as server:
        found = {"http": answers(server), "grpc": grpc_answers(server)}
        _, constrained = post(server, "/v1/completions", {"prompt": "phone:", **PHONE})
        _, embeddings = post(server, "/v1/embeddings", {"input": [*PROMPTS]})
    with LLM("demo", mesh=mesh, max_model_len=256, compilation_cache_dir=str(PROGRAMS_CACHE), **SMALL) as llm:
        expected = expected_answers(llm)
        (number,) = llm.generate("phone:", SamplingParams(**PHONE), use_tqdm=False)
        vectors = [output.outputs.embedding for output in llm.embed([*PROMPTS], use_tqdm=False)]
    text = constrained["choices"][0]["text"]
    assert text == number.outputs[0].text and re.fullmatch(r"\d{3}-\d{4}", text)
    assert [each["embedding"] for each in embeddings["data"]] == [pytest.approx(each, abs=1e-3) for each in vectors]
    for api, each in found.items():
        assert each[0][0] == "42", api
        assert_same(each, expected)


@pytest.mark.parametrize("shape", ["mixtral", "deepseek", "gpt_oss"])
def test_two_groups_of_one_process_answer_as_one_engine(shape: str, tmp_path: Path) -> None:
    write_checkpoint_with_tokenizer(tmp_path, SHAPES[shape], seed=7)
    settings = {**SMALL, "max_model_len": 128, "num_gpu_blocks_override": 48}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with running_group("--data-parallel-size=2", *flags, model=str(tmp_path), engine=False) as server:
        found = {"http": answers(server), "grpc": grpc_answers(server)}
        assert text_of(server, "/metrics").count("jaxserve:group_up{") == 2
    with LLM(str(tmp_path), compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        expected = expected_answers(llm)
    assert len({text for text, *_ in expected}) > 6, "the requests do not all give the same"
    for each in found.values():
        assert_same(each, expected)


@pytest.mark.parametrize("mesh", ["tensor=4", "stage=2,tensor=2", "stage=4"])
def test_stories(mesh: str, stories_model: Path) -> None:
    """The greedy tokens of transformers, of all prompts at once."""
    cases = json.loads((stories_model / "expected.json").read_text())["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STORY_TOKENS)
    flags = ("--mesh", mesh, "--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    with running_group(*flags, model=str(stories_model), engine=False) as server, Client(server.grpc) as client:
        with ThreadPoolExecutor() as clients:
            outputs = [*clients.map(lambda case: client.generate(case["prompt_ids"], params), cases)]
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [case["greedy_ids"][:NUM_STORY_TOKENS] for case in cases]


@pytest.mark.parametrize("mesh", ["tensor=4", "stage=2,tensor=2"])
def test_a_trace_of_conversations(mesh: str, stories_model: Path, shared_data: Path) -> None:
    """Eight clients at a time replay it, with too few pages: each request has the text that one process gives it."""
    bodies = conversations(shared_data / "traces" / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv")
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 8, "num_gpu_blocks_override": 160}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
    with running_group(*flags, "--mesh", mesh, "--dtype=float32", model=str(stories_model), engine=False) as server:
        with ThreadPoolExecutor(engine["max_num_seqs"]) as clients:
            answered = [*clients.map(lambda body: post(server, "/v1/completions", body), bodies)]
        preemptions = re.findall(r"(?m)^jaxserve:num_preemptions_total\S* (\S+)$", text_of(server, "/metrics"))
    assert [status for status, _ in answered] == [200] * NUM_REQUESTS
    assert float(preemptions[0]) > 0
    prompts = [{"prompt_token_ids": body["prompt"]} for body in bodies]
    params = [SamplingParams(**{name: value for name, value in body.items() if name != "prompt"}) for body in bodies]
    with LLM(
        str(stories_model), mesh=mesh, dtype="float32", compilation_cache_dir=str(PROGRAMS_CACHE), **engine
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for (_, response), output in zip(answered, outputs, strict=True):
        assert response["choices"][0]["text"] == output.outputs[0].text


def conversations(path: Path) -> list[dict[str, Any]]:
    """Requests with the lengths of a trace, scaled down; some begin alike, and every other one is drawn by its seed."""
    generator, bodies = np.random.default_rng(0), list[dict[str, Any]]()
    beginning = generator.integers(3, 512, 32).tolist()
    with path.open(newline="") as file:
        for number, row in enumerate(itertools.islice(csv.DictReader(file), NUM_REQUESTS)):
            num_new, length = (max(1, int(row[name]) // SCALE) for name in ("GeneratedTokens", "ContextTokens"))
            num_new = min(num_new, CONTEXT - 1)
            prompt = generator.integers(3, 512, min(length, CONTEXT - num_new)).tolist()
            prompt = (beginning + prompt)[: len(prompt)] if number % 3 == 0 else prompt
            options = {"temperature": float(number % 2), "seed": number, "max_tokens": num_new, "ignore_eos": True}
            bodies.append({"prompt": prompt, **options})
    return bodies
