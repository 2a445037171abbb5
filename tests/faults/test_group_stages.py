"""Two processes with a pipeline stage each: the answers of one process, and a clean end whichever stage is lost."""

import threading
from typing import Any

import pytest

from jaxserve import LLM
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    follower_pid,
    kill,
    post,
    running_group,
)
from tests.server_process import PROGRAMS_CACHE

pytestmark = pytest.mark.slow
BODY = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def test_stages_of_two_processes_answer_as_one_and_end_together() -> None:
    with running_group("--pipeline-parallel-size", "2", "--dtype", "float32", "--step-timeout", "5") as server:
        found = answers(server)
        processes = family(server.process.pid)
        responses: list[Any] = []
        clients = [
            threading.Thread(target=lambda: responses.append(post(server, "/v1/completions", BODY))) for _ in "ab"
        ]
        for client in clients:
            client.start()
        kill(follower_pid(server))
        for client in clients:
            client.join()
        assert all(status in (200, 503) for status, _ in responses), responses
        status, response = post(server, "/v1/completions", BODY)
        assert status == 503 and "rank 1 of its processes ended" in response["error"]["message"], response
        assert_gone(processes[1:], within_s=20.0)
        assert server.wait() == 70
        log = server.log.read_text()
        assert "was killed by SIGKILL" in log and "the group ends: rank 1 (host " in log
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", pipeline_parallel_size=2, compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))
