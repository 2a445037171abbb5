"""An engine in several processes moves to other meshes while requests run: they go on with the same tokens."""

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve import RequestError
from jaxserve.client import AdminClient
from scripts.server_child import RunningServer
from tests.group_driver import outcomes_of_group, run_requests, start
from tests.group_server import (
    answers,
    assert_ends_with_its_follower,
    assert_same,
    family,
    follower_pid,
    kill,
    post,
    running_group,
)
from tests.jaxserve.group.test_group_meshes import ALIKE, DRAFT_MODEL, SETTINGS, SHAPES
from tests.random_checkpoint import LLAMA, write_checkpoint_with_tokenizer
from tests.server_process import PROGRAMS_CACHE

pytestmark = pytest.mark.slow
Moves = list[tuple[str, str | None]]
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **LLAMA,
        **ALIKE,
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "bamba": {
        **LLAMA,
        **ALIKE,
        "architectures": ["BambaForCausalLM"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
        "attn_layer_indices": [1],
    },
}
"""Models with states, which move too."""
BACK_AND_FORTH: Moves = [("stage=2,tensor=2", None), ("tensor=4", None)]
TWO_SLICES: Moves = [("data=2,tensor=2", None), ("tensor=4", None)]
SLICES: Moves = [("data=2,tensor=2", None), ("data=2,stage=2", None), ("data=4", None), ("tensor=4", None)]
CASES: list[tuple[str, int, dict[str, Any], Moves]] = [
    ("llama", 2, {"mesh": "tensor=4"}, BACK_AND_FORTH),
    ("llama", 4, {"mesh": "tensor=4"}, BACK_AND_FORTH),
    ("sparse", 2, {"mesh": "tensor=4"}, [("tensor=2,expert=2", None), ("stage=2,expert=2", None), ("tensor=4", None)]),
    ("deepseek", 2, {"mesh": "stage=2,tensor=2"}, [("tensor=2,expert=2", None), ("stage=2,tensor=2", None)]),
    ("gpt_oss", 2, {"mesh": "tensor=4"}, BACK_AND_FORTH),
    ("qwen3_5", 2, {"mesh": "tensor=4"}, BACK_AND_FORTH),
    ("bamba", 2, {"mesh": "stage=2"}, [("tensor=2", None), ("stage=2", None)]),
    ("llama", 2, {"mesh": "tensor=4", "speculative_config": DRAFT_MODEL}, BACK_AND_FORTH),
    ("llama", 2, {"mesh": "tensor=4"}, SLICES),
    ("llama", 4, {"mesh": "tensor=4"}, SLICES),
    ("sparse", 2, {"mesh": "tensor=4"}, [("data=2,expert=2", None), ("tensor=2,expert=2", None)]),
    ("qwen3_5", 2, {"mesh": "tensor=4"}, [("data=2,tensor=2", None), ("tensor=4", None)]),
    (
        "llama",
        2,
        {"mesh": "tensor=4", "speculative_config": DRAFT_MODEL},
        [("data=2,tensor=2", None), ("tensor=4", None)],
    ),
]


@pytest.mark.parametrize(("shape", "count", "settings", "moves"), CASES)
def test_requests_go_on_with_the_same_tokens(
    shape: str, count: int, settings: dict[str, Any], moves: Moves, tmp_path: Path
) -> None:
    """Texts, tokens and finish reasons are equal; logprobs and vectors but for the last bits."""
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint_with_tokenizer(model, {**SHAPES, **RECURRENT}[shape], seed=7)
    if "speculative_config" in settings:
        settings = {**settings, "speculative_config": {**settings["speculative_config"], "model": str(model)}}
    blocks = {"num_gpu_blocks_override": 32}
    arguments = {"model": str(model), **SETTINGS, **blocks, **settings, "compilation_cache_dir": str(PROGRAMS_CACHE)}
    found = outcomes_of_group(arguments, count, tmp_path, moves)
    started = start(arguments)
    expected = json.loads(json.dumps(run_requests(started)))
    started.engine.close()
    for (mine, my_scores, my_vector), (theirs, scores, vector) in zip(found, expected, strict=True):
        assert mine == theirs
        assert my_scores == pytest.approx(scores, abs=1e-3)
        assert my_vector == (vector if vector is None else pytest.approx(vector, abs=1e-3))
    reports = json.loads((tmp_path / "moves").read_text())
    assert len(reports) == len(moves)
    for report in reports:
        assert report["num_requeued"] and report["num_pages"], report
        assert (report["num_states"] > 0) == (shape in RECURRENT), report


def test_moves_that_cannot_be_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint_with_tokenizer(model, SHAPES["llama"], seed=7)
    arguments = {"model": str(model), **SETTINGS, "mesh": "tensor=2", "compilation_cache_dir": str(PROGRAMS_CACHE)}
    moves: Moves = [("data=3", None), ("tensor=4", None), ("tensor=2", "none such"), ("stage=2", None)]
    outcomes_of_group(arguments, 2, tmp_path, moves)
    *refused, moved = json.loads((tmp_path / "moves").read_text())
    assert "cannot share a mesh of 3 devices equally (data=3, stage=1, " in refused[0]
    assert "the mesh needs 4 devices" in refused[1] and "none such" in refused[2]
    assert moved["to_mesh"] == {"data": 1, "stage": 2, "tensor": 1}


def test_a_server_moves_while_clients_wait() -> None:
    with running_group("--tensor-parallel-size", "2", "--dtype", "float32", "--step-timeout", "30") as server:
        expected, found, has_moved = answers(server), list[Any](), threading.Event()

        def ask() -> None:
            while not has_moved.is_set():
                found.append(answers(server))

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            with AdminClient(server.admin) as admin:
                for mesh in ("stage=2", "data=2", "tensor=2", "data=2", "stage=2"):
                    report = admin.reshard(mesh)
                    assert report.pause_s > 0
                    found.append(answers(server))
                with pytest.raises(RequestError, match="cannot share a mesh of 3 devices equally"):
                    admin.reshard("data=3")
        finally:
            has_moved.set()
            for client in clients:
                client.join()
        for each in found:
            assert_same(each, expected)
        assert_ends_with_its_follower(server)


def engine_pid(server: RunningServer) -> int:
    """Process id of the engine of rank 0."""
    found = family(server.process.pid)
    return next(pid for pid in found if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_group_that_has_moved_starts_again_where_it_was() -> None:
    """All its processes do, also those that something else starts by the old command; it can move back."""
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--step-timeout", "30", "--restart-engine")
    with running_group(*flags) as server, AdminClient(server.admin) as admin:
        expected, seeds = answers(server), itertools.count()
        for number, mesh in enumerate(("stage=2", "data=2", "tensor=2"), 1):
            admin.reshard(mesh)
            kill(follower_pid(server) if number < 3 else engine_pid(server))
            while server.log.read_text().count("the engine process was started again") < number:
                body = {"prompt": "12+30=", "max_tokens": 2, "seed": next(seeds)}  # one that saw two ends is refused
                assert post(server, "/v1/completions", body)[0] in (200, 503)
            assert_same(answers(server), expected)
            report = admin.reshard(mesh)
            assert {axis.name: axis.size for axis in report.from_mesh} == {
                axis.name: axis.size for axis in report.to_mesh
            }
