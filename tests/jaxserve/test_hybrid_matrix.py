"""Families with recurrent layers on every kind of mesh, in chunks of every size, in every situation.

Each family runs on all meshes, with chunks and scheduling that take turns, so that every pair of mesh, chunk and
scheduling is met by some family. Answers are transformers' wherever a prompt is computed from: the beginning, any page,
the state of another sample, that of a preempted sequence or one that has moved to another mesh.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api.request import parse_prompt
from tests.hooks import pages_of_one_request
from tests.jaxserve import test_models as models
from tests.jaxserve.test_hybrids import ROWS, checkpoint, chosen_logprobs, saved, settings_of
from tests.jaxserve.test_lanes import finish, schedulers, tokens, value
from tests.jaxserve.test_models import NUM_NEW, Checkpoint

pytestmark = pytest.mark.slow

MESHES = ("tp1", "tp2", "pp2", "dp2", "experts2")
CHUNKS = (1, 7, 64, 0)
"""Most tokens of a prompt in one step; 0 for all."""
MOVES = {"tp1": "tensor=2", "tp2": "stage=2", "pp2": "data=2", "dp2": "tensor=2", "experts2": "tensor=2,expert=2"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, logprobs=0)
__all__ = ["checkpoint", "saved"]


def cases() -> list[Any]:
    """Every family with every mesh that it can have; chunks and scheduling take turns."""
    found = list[Any]()
    for family, (name, row) in enumerate(ROWS.items()):
        for mesh, layout in enumerate(MESHES):
            if layout in ("tp1", "tp2", "pp2", "dp2") or row.num_experts:
                chunk, is_async = CHUNKS[(family + mesh) % 4], (family + mesh) // 4 % 2 == 0
                found.append(pytest.param(name, layout, chunk, is_async, id=f"{name}-{layout}-{chunk}-{is_async}"))
    return found


@pytest.mark.parametrize(("name", "layout", "chunk", "is_async"), cases())
def test_answers_are_those_of_transformers(
    name: str, layout: str, chunk: int, is_async: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    made, longest = checkpoint(name), max(models.PROMPT_LENGTHS)
    prompt, answer = made.prompts[-1], made.expected[-1]
    most = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": chunk}
    settings = settings_of(layout, async_scheduling=is_async, **most)
    cold = np.array(models.logits_of(made.model, [*prompt, *answer]))
    cold -= np.log(np.exp(cold - cold.max(1, keepdims=True)).sum(1, keepdims=True)) + cold.max(1, keepdims=True)
    expected = [cold[at, token] for at, token in enumerate([*prompt, *answer][longest:], longest - 1)]

    def check(output: Any) -> None:
        for sample in output.outputs:
            assert sample.token_ids == answer
        np.testing.assert_allclose(chosen_logprobs(output), expected, atol=1e-3)

    with LLM(str(made.directory), **settings, num_gpu_blocks_override=200) as llm:
        for each, known in zip(llm.generate(made.prompts, GREEDY, use_tqdm=False), made.expected, strict=True):
            assert each.outputs[0].token_ids == known
        for end in range(8, longest + 1, 8):  # a hit at every page
            llm.reset_prefix_cache()
            llm.generate([prompt[:end] + [3, 9]], GREEDY.clone(max_tokens=2), use_tqdm=False)
            (found,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert (found.num_cached_tokens or 0) >= min(end, longest - 1) // 8 * 8
            check(found)
        llm.reset_prefix_cache()
        check(llm.generate([prompt], GREEDY.clone(n=2, temperature=1.0, top_k=1), use_tqdm=False)[0])
        requests = [llm.engine.submit(parse_prompt({"prompt_token_ids": prompt}, GREEDY)) for _ in range(2)]
        for _ in range(6):
            llm.engine.step()
        assert not llm.reshard(MOVES[layout]).num_recomputed_tokens
        finish(llm)
        for request in requests:
            check(request.output())
        again = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert again.num_cached_tokens == longest - 1
        check(again)
        for scheduler in schedulers(llm):
            assert scheduler.pages.states is not None and not scheduler.pages.states.allocator.num_running
    pages = pages_of_one_request(made.directory, **settings)
    with LLM(str(made.directory), **settings, num_gpu_blocks_override=pages) as llm:
        requests = [llm.engine.submit(parse_prompt({"prompt_token_ids": prompt}, GREEDY)) for _ in range(4)]
        finish(llm)
        assert value(llm, "num_preemptions") > 0
        for request in requests:
            assert tokens(request) == answer
            check(request.output())
