"""States of recurrent layers move with the pages of the prefix cache: no bit is lost, nothing is computed again."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.api.config import EngineConfig
from jaxserve.api.request import parse_prompt
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.reshard.page_transfer import can_share_pages
from jaxserve.reshard.state_transfer import HostStates, StateReader, StateWrite, StateWriter, has_states
from tests.jaxserve import test_hybrids as hybrids
from tests.jaxserve import test_models as models
from tests.jaxserve.test_lanes import GREEDY, finish, schedulers, tokens, value

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "max_model_len": 96,
    "num_gpu_blocks_override": 256,
    "compilation_cache_dir": "",
    "warm_up": False,
}
MESHES = ("tensor=2", "data=2", "stage=2", "tensor=4", "data=2,stage=2", "tensor=1")
EXPERTS = ("tensor=2", "expert=2", "stage=2", "tensor=2,expert=2", "data=2")
ALIKE = (
    "qwen3-5-vision",
    "falcon-h1-plain",
    "falcon-h1-gate-first",
    "lfm2-tied",
    "kimi-linear-groups",
)  # their layers are those of others


def rows() -> list[Any]:
    """Rows of families whose layers differ, each with its meshes."""
    differing = {name: row for name, row in hybrids.ROWS.items() if name not in ALIKE}
    return [pytest.param(name, EXPERTS if row.num_experts else MESHES, id=name) for name, row in differing.items()]


def make(name: str, directory: Path) -> None:
    """Write a row's checkpoint."""
    row = hybrids.ROWS[name]
    models.torch.set_num_threads(1)
    models.save(hybrids.make_hf(row), row, directory)


def plan(directory: Path, mesh: str) -> EnginePlan:
    config = EngineConfig(model=str(directory), **{**SETTINGS, "mesh": mesh, "num_gpu_blocks_override": 16})
    return plan_engine(config)


def moved(states: HostStates, count: int, plan: EnginePlan) -> HostStates:
    """States after they were written to pages of the last lane of a plan's stages in reverse, and read again."""
    found: HostStates = {}
    for sharded in plan.replicas[0]:
        if not has_states(sharded):
            continue
        pools = jax.tree.map(lambda struct: jax.numpy.zeros(struct.shape, struct.dtype), sharded.abstract_all_pools())
        pools = jax.device_put(pools, jax.tree.map(lambda struct: struct.sharding, sharded.abstract_all_pools()))
        pages = [sharded.num_states - 1 - number for number in range(count)]
        others = [list[StateWrite]() for _ in range(sharded.num_lanes - 1)]
        writes = [StateWrite(states, number, page) for number, page in enumerate(pages)]
        pools = StateWriter(sharded).write(pools, [*others, writes])
        *_, last = StateReader(sharded).read(pools, [*([] for _ in others), pages])
        found |= last
    return found


@pytest.mark.parametrize(("name", "meshes"), rows())
def test_states_have_the_same_bits_on_every_mesh(name: str, meshes: tuple[str, ...], tmp_path: Path) -> None:
    make(name, tmp_path)
    rng, count, first = np.random.default_rng(0), 4, plan(tmp_path, "tensor=1")
    zeros = moved({}, 0, first)
    states = {
        layer: tuple(rng.normal(size=(count, *array.shape[1:])).astype(array.dtype) for array in arrays)
        for layer, arrays in zeros.items()
    }
    for mesh in meshes:
        new = plan(tmp_path, mesh)
        assert can_share_pages(first.replicas[0], new.replicas[0]) or "stage" in mesh
        found = moved(states, count, new)
        assert found.keys() == states.keys()
        for layer, arrays in states.items():
            for array, other in zip(arrays, found[layer], strict=True):
                np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize(("name", "meshes"), rows())
def test_requests_go_on_from_their_states(name: str, meshes: tuple[str, ...], tmp_path: Path) -> None:
    """While they are computed, decode and wait; and a prompt from before is found on each mesh."""
    make(name, tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts(150)]
    params = GREEDY.clone(max_tokens=48, logprobs=0)
    with LLM(str(tmp_path), **SETTINGS) as still:
        expected = still.generate(prompts, params, use_tqdm=False)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        requests = [llm.engine.submit(parse_prompt(prompt, params)) for prompt in prompts]
        asked, wanted = [*requests], [*expected]
        for mesh in meshes:
            for _ in range(5):
                llm.engine.step()
            report = llm.reshard(mesh)
            assert report.num_requeued and report.num_states > 0
            has_twins = any(report.from_mesh.get(axis, 1) > 1 for axis in ("data", "expert"))
            assert has_twins or report.num_states == report.num_cached_states, "a state is lost"
            assert not report.num_recomputed_tokens, "the state of each sequence is where it was"
            asked.append(llm.engine.submit(parse_prompt(prompts[-1], GREEDY.clone(max_tokens=2, logprobs=0))))
            wanted.append(expected[-1])
        finish(llm)
        for request, known in zip(asked, wanted, strict=True):
            found, logprobs = tokens(request), hybrids.chosen_logprobs(request.output())
            assert found == known.outputs[0].token_ids[: len(found)]
            np.testing.assert_allclose(logprobs, hybrids.chosen_logprobs(known)[: len(found)], atol=1e-3)
        assert all(request.num_cached_tokens for request in asked[len(prompts) :])
        for scheduler in schedulers(llm):
            states = scheduler.pages.states
            assert states is not None and not states.allocator.num_running
            assert scheduler.allocator.num_free == scheduler.allocator.num_pages
        assert value(llm, "compiles_after_ready") == 0


def test_a_move_there_and_back_leaves_the_bits_of_states(tmp_path: Path) -> None:
    """What was computed on one device goes on there as if it had never moved."""
    make("qwen3-5", tmp_path)
    prompt = {"prompt_token_ids": models.prompts(150)[-1]}
    params = GREEDY.clone(max_tokens=40, logprobs=0)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        request = llm.engine.submit(parse_prompt(prompt, params))
        for _ in range(12):
            llm.engine.step()
        for mesh in ("stage=2", "tensor=2", "data=2", "tensor=1"):
            llm.reshard(mesh)
        finish(llm)
        assert tokens(request) == expected.outputs[0].token_ids
        assert request.output().outputs[0].logprobs == expected.outputs[0].logprobs
