"""The story of an engine in two processes: the answers of one process, then the death of a follower."""

from jaxserve import LLM
from tests.group_server import (
    answers,
    assert_ends_with_its_follower,
    assert_same,
    expected_answers,
    running_group,
    text_of,
)
from tests.server_process import PROGRAMS_CACHE


def number_of(metrics: str, name: str) -> float:
    """The value of a metric with one set of labels."""
    (line,) = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return float(line.split()[-1])


def test_two_processes_answer_as_one_and_end_together() -> None:
    with running_group("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        found = answers(server)
        metrics = text_of(server, "/metrics")
        steps, sent = (number_of(metrics, f"jaxserve:group_{name}_total") for name in ("steps", "sent_bytes"))
        assert steps == number_of(metrics, "jaxserve:steps_total") > 0 and sent > 20 * steps
        assert_ends_with_its_follower(server)
        log = server.log.read_text()
        assert "was killed by SIGKILL" in log and "the group ends: rank 1 (host " in log and "has ended" in log
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", tensor_parallel_size=2, compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))
