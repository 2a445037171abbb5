"""The story of an engine in two processes: the answers of one process, then the death of a follower."""

import json
import socket
import time

from jaxserve import LLM
from jaxserve.client import AdminClient
from scripts.server_child import RunningServer
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


def assert_follows(server: RunningServer) -> None:
    """The follower has been sent every step, and finishes the last one soon after the clients have their answers."""
    until_s = time.monotonic() + 20.0
    while True:
        metrics = text_of(server, "/metrics")
        finished, sent = (number_of(metrics, f"jaxserve:group_{name}_total") for name in ("steps", "sent_bytes"))
        steps = number_of(metrics, "jaxserve:steps_total")
        if finished == steps or time.monotonic() > until_s:
            break
        time.sleep(0.05)
    assert finished == steps > 0 and sent > 20 * steps
    shown = {"engine": 0, "rank": 1, "host": socket.gethostname(), "num_steps": finished, "num_sent_bytes": sent}
    (on_page,) = json.loads(text_of(server, "/status.json"))["ranks"]
    with AdminClient(server.admin) as client:
        (told,) = client.load().ranks
    in_load = {field.name: getattr(told, field.name) for field in told.DESCRIPTOR.fields}
    for found in (on_page, in_load):  # an idle follower gets a message now and then
        assert found.pop("num_sent_bytes") >= sent
        assert found == {name: value for name, value in shown.items() if name != "num_sent_bytes"}


def test_two_processes_answer_as_one_and_end_together() -> None:
    with running_group("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        found = answers(server)
        assert_follows(server)
        assert_ends_with_its_follower(server)
        log = server.log.read_text()
        assert all(f"[rank {rank} {socket.gethostname()}] 20" in log for rank in range(2)), log
        assert "was killed by SIGKILL" in log and "the group ends: rank 1 (host " in log and "has ended" in log
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", tensor_parallel_size=2, compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))
