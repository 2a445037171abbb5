"""The story of an engine in two processes: the answers of one process, then the death of a follower."""

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


def test_two_processes_answer_as_one_and_end_together() -> None:
    with running_group("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        found = answers(server)
        processes = family(server.process.pid)
        kill(follower_pid(server))
        status, response = post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 8})
        assert status == 503 and "rank 1 of its processes ended" in response["error"]["message"]
        assert_gone(processes[1:], within_s=10.0)
        assert server.wait() == 70
        log = server.log.read_text()
        assert "was killed by SIGKILL" in log and "the group ends: rank 1 (host " in log and "has ended" in log
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", tensor_parallel_size=2, compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))
