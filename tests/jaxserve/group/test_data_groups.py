"""Two groups of one process each behind one front end: the answers of one engine, and the death of one of them."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.api.errors import ConfigError
from jaxserve.server.engine_groups import group_arguments
from scripts.server_child import RunningServer
from tests.group_server import answers, assert_same, expected_answers, family, kill, post, running_group, text_of
from tests.server_process import PROGRAMS_CACHE

FLAGS = ("--data-parallel-size", "2", "--dtype", "float32")
LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def engines(server: RunningServer) -> list[int]:
    """Process ids of the engines."""
    found = family(server.process.pid)
    return [pid for pid in found if b"jaxserve.server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ask_both(server: RunningServer) -> list[Any]:
    """Statuses and messages of four clients of long requests, so that both groups have some."""
    found: list[Any] = []

    def ask(number: int) -> None:
        while True:
            status, response = post(server, "/v1/completions", {**LONG, "prompt": f"{number}+30="})
            if status != 200 or len(engines(server)) < 2:
                found.append((status, response.get("error", {}).get("message", "")))
                return

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    while text_of(server, "/metrics").count("jaxserve:num_requests_running{") < 2:
        time.sleep(0.05)
    kill(engines(server)[1])
    for client in clients:
        client.join()
    return found


@pytest.mark.slow
def test_two_groups_answer_as_one_engine_and_one_outlives_the_other() -> None:
    with running_group(*FLAGS) as server:
        found = answers(server)
        assert len(engines(server)) == 2
        for engine in ("0", "1"):
            (line,) = [
                line
                for line in text_of(server, "/metrics").splitlines()
                if line.startswith("jaxserve:steps_total{") and f'engine="{engine}"' in line
            ]
            assert float(line.split()[-1]) > 0
        for status, message in ask_both(server):
            assert status == 200 or (status == 503 and "was killed by SIGKILL" in message), message
        assert len(engines(server)) == 1
        assert answers(server) == found
        kill(engines(server)[0])
        assert server.wait() == 70
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))


@pytest.mark.slow
def test_a_group_is_started_again() -> None:
    with running_group(*FLAGS, "--restart-engine") as server:
        first = engines(server)
        kill(first[0])
        while (
            len(now := engines(server)) < 2 or "group 0: the engine process was started" not in server.log.read_text()
        ):
            assert post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 2})[0] in (200, 503)
        assert first[1] in now and first[0] not in now


def test_each_group_has_its_own_devices_and_seed() -> None:
    found = group_arguments({"mesh": "data=2,tensor=2", "seed": 3}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [each["CUDA_VISIBLE_DEVICES"] for _, each in found] == ["4,5", "6,7"]
    assert [(each["data_parallel_size"], each["tensor_parallel_size"], each["seed"]) for each, _ in found] == [
        (1, 2, 3),
        (1, 2, 4),
    ]
    assert [each["CUDA_VISIBLE_DEVICES"] for _, each in group_arguments({"data_parallel_size": 2}, {})] == ["0", "1"]
    with pytest.raises(ConfigError, match="need 2 GPUs, but CUDA_VISIBLE_DEVICES names 1"):
        group_arguments({"data_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "0"})
