"""Drafters trained for their model (``tests/demo_drafters``): as good as their files promise, whatever came before.

Verification hides a drafter that is run wrongly, which only makes texts slower; here its acceptance is known without
the engine.
"""

import functools
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.api.draft_totals import DraftTotals
from jaxserve.demo import MODEL_DIRECTORY, tasks
from jaxserve.device.catching_up import CatchUp
from jaxserve.device.memory import resident_bytes, return_freed_memory
from jaxserve.scheduling.draft_passes import DraftPasses
from jaxserve.scheduling.scheduler import Scheduler
from scripts.demo import eagle3, model_directory, mtp, network
from scripts.demo.network import Rows
from tests import draft_heads

DRAFTERS = Path(__file__).resolve().parent.parent / "demo_drafters"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 320,
    "max_model_len": 96,
    "block_size": 8,
    "num_gpu_blocks_override": 120,
    "compilation_cache_dir": "",
    "compile_sizes": {"decode": [8], "mixed": [320]},
}
PROMPTS = [tasks.completion_prompt(item) for task in tasks.TASKS for item in tasks.held_out(task, 12, seed=3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
llama_states = jax.jit(network.llama_states)
llama_logits = jax.jit(network.llama_logits, static_argnums=2)
mtp_states = jax.jit(mtp.seen_states)


class Pair(NamedTuple):
    """A model and its drafter.

    Attributes:
        model: Directory of the model.
        drafter: Directory of the drafter, or of the model with an MTP layer.
        guess: Returns the draft after each token of a text, from the text up to it, as the files say.
        shapes: Tensors that are trained.
    """

    model: Path
    drafter: Path
    guess: Callable[[list[int]], np.ndarray]
    shapes: dict[str, tuple[int, ...]]


def guess_small(tokens: list[int]) -> np.ndarray:
    logits = llama_logits(tensors_of(DRAFTERS / "small"), one_row(tokens), model_directory.SMALL)
    return np.asarray(logits)[0, : len(tokens)].argmax(-1)


def guess_eagle3(tokens: list[int]) -> np.ndarray:
    return eagle3_logits(tokens).argmax(-1)


def eagle3_logits(tokens: list[int]) -> np.ndarray:
    """Logits of the head, read with NumPy; the target's states are those of the training script."""
    target, head, config = tensors_of(MODEL_DIRECTORY), tensors_of(DRAFTERS / "eagle3"), eagle3.head_config()
    inputs = [np.asarray(each)[0, : len(tokens)] for each in llama_states(target, one_row(tokens))]
    aux = np.concatenate([inputs[layer] for layer in eagle3.AUX_LAYERS], 1)
    states = draft_heads.eagle3_states(head, config, aux)
    hidden = draft_heads.eagle3_hidden(head, config, inputs[0], before(states), 0)
    return draft_heads.eagle3_logits(head, hidden, len(target["model.embed_tokens.weight"]))


def guess_mtp(tokens: list[int]) -> np.ndarray:
    model, config = tensors_of(DRAFTERS / "mtp"), mtp.target_config()
    seen = np.asarray(mtp_states(model, one_row(tokens)))[0, : len(tokens)]
    hidden = draft_heads.mtp_hidden(model, config, model["model.embed_tokens.weight"][tokens], before(seen), 0)
    return draft_heads.mtp_logits(model, config, hidden)[0].argmax(-1)


@functools.cache
def tensors_of(directory: Path) -> dict[str, Any]:
    stored = load_file(directory / "model.safetensors")
    return {name: each.astype(np.float32) if each.dtype.name == "bfloat16" else each for name, each in stored.items()}


def one_row(tokens: list[int]) -> Rows:
    """A text, padded so that one compiled program is for all."""
    ids = np.zeros((1, SETTINGS["max_model_len"]), np.int32)
    ids[0, : len(tokens)] = tokens
    return Rows(jnp.asarray(ids), jnp.ones_like(ids), jnp.ones_like(ids, bool))


def before(states: np.ndarray) -> np.ndarray:
    """The state of the token before each; zeros for the first."""
    return np.concatenate([np.zeros_like(states[:1]), states[:-1]])


PAIRS = {
    "draft_model": Pair(
        MODEL_DIRECTORY, DRAFTERS / "small", guess_small, model_directory.weight_shapes(model_directory.SMALL)
    ),
    "eagle3": Pair(MODEL_DIRECTORY, DRAFTERS / "eagle3", guess_eagle3, eagle3.weight_shapes()),
    "mtp": Pair(DRAFTERS / "mtp", DRAFTERS / "mtp", guess_mtp, mtp.weight_shapes()),
}
METHODS = [
    "eagle3",
    pytest.param("draft_model", marks=pytest.mark.slow),
    pytest.param("mtp", marks=pytest.mark.slow),
]


def engine(method: str, num_tokens: int, **more: Any) -> LLM:
    """An engine that verifies all drafts of a pair, or of a method without a drafter."""
    pair = PAIRS.get(method, Pair(MODEL_DIRECTORY, MODEL_DIRECTORY, guess_small, {}))
    named: dict[str, Any] = {} if pair.drafter == pair.model else {"model": str(pair.drafter)}
    if method == "suffix":
        named = {"suffix_decoding_max_cached_requests": 1000}
    number = {"num_speculative_tokens": num_tokens, "enable_adaptive_verification": False}
    return LLM(str(pair.model), **SETTINGS | more, speculative_config={"method": method, **number, **named})


def texts_of(llm: LLM) -> list[tuple[list[int], int]]:
    """The greedy completions of all prompts: all tokens, and how many are of the prompt."""
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all(each.prompt_token_ids for each in found)
    return [
        ([*(each.prompt_token_ids or []), *each.outputs[0].token_ids], len(each.prompt_token_ids or []))
        for each in found
    ]


def counted(tokens: list[int], num_prompt: int, drafts: np.ndarray) -> list[bool]:
    """Whether each draft is right that an engine with one draft per row verifies."""
    found, latest = list[bool](), num_prompt
    while latest + 1 < len(tokens):
        found.append(bool(drafts[latest] == tokens[latest + 1]))
        latest += 1 + found[-1]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_first_drafts_are_accepted_as_often_as_the_files_say(method: str) -> None:
    with engine(method, 1) as llm:
        texts = texts_of(llm)
        totals = DraftTotals.of(llm.get_metrics())
    guess, expected = PAIRS[method].guess, list[bool]()
    for tokens, num_prompt in texts:
        expected += counted(tokens, num_prompt, guess(tokens))
    assert totals.num_drafts == len(expected) > 100
    assert totals.acceptance_rate == pytest.approx(np.mean(expected), abs=0.02)
    assert totals.acceptance_rate >= 0.6


def test_the_files_are_what_the_training_script_writes() -> None:
    for method, pair in PAIRS.items():
        stored = load_file(pair.drafter / "model.safetensors")
        assert pair.shapes.items() <= {name: each.shape for name, each in stored.items()}.items(), method
        layer = [each.nbytes for name, each in stored.items() if method != "mtp" or "layers.2." in name]
        assert sum(layer) <= 500_000
    assert json.loads((DRAFTERS / "eagle3" / "config.json").read_text()) == eagle3.head_config()
    assert json.loads((DRAFTERS / "mtp" / "config.json").read_text()) == mtp.target_config()
    assert json.loads((DRAFTERS / "small" / "config.json").read_text()) == model_directory.config(model_directory.SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_drafts_after_steps_without_are_those_of_a_drafter_that_is_never_late(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that make none leave their tokens to a later pass, which finds the states of all before."""
    found, taken = [], list[int]()
    run = CatchUp.run

    def noted(self: CatchUp, *given: Any) -> Any:
        taken.append(len(self._postponed))
        return run(self, *given)

    for is_late in (True, False):
        numbers = itertools.cycle([0] * 9 + [2] * 3)
        monkeypatch.setattr(DraftPasses, "choose", lambda *_, numbers=numbers: next(numbers))
        monkeypatch.setattr(CatchUp, "run", noted)
        if not is_late:
            monkeypatch.setattr(CatchUp, "waits", lambda *_: False)
        with engine(method, 2, async_scheduling=False) as llm:
            texts = [texts_of(llm) for _ in range(2)]  # the second from cached pages
            totals = DraftTotals.of(llm.get_metrics())
            found.append((texts, totals))
        if is_late and not any(taken):
            pytest.skip("its kernels do not skip padding here, so that it takes in each token at once")
    assert max(taken) > 2
    assert found[0] == found[1]


# --------------------------------------------------------------------------------------------- what came before

MANY = [tasks.completion_prompt(item) for task in tasks.TASKS for item in tasks.held_out(task, 40, seed=4)]
NUM_OTHERS = 10_000
MEGABYTE = 1 << 20


def acceptance(llm: LLM) -> np.ndarray:
    """How often drafts are accepted at each position, in the greedy completions of many prompts."""
    earlier = DraftTotals.of(llm.get_metrics())
    llm.generate(MANY, GREEDY, use_tqdm=False)
    totals = DraftTotals.of(llm.get_metrics()).since(earlier)
    return np.array(totals.accepted) / totals.num_drafts


def scheduler_of(llm: LLM) -> Scheduler:
    (replica,) = llm.engine.replicas
    (scheduler,) = replica.schedulers
    return scheduler


def run_others(llm: LLM, number: int, seed: int) -> None:
    """Requests with short random prompts, of which some begin alike."""
    source = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True)
    for _ in range(number // 500):
        prompts = [{"prompt_token_ids": source.integers(8, 40, 10).tolist()} for _ in range(500)]
        llm.generate(prompts, params, use_tqdm=False)


def in_use() -> np.ndarray:
    """Bytes of the process, Python objects, and arrays on the devices."""
    gc.collect()
    return_freed_memory()
    return np.array([resident_bytes(), len(gc.get_objects()), len(jax.live_arrays())])


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_acceptance_is_the_same_whatever_came_before(method: str) -> None:
    """Cold, from the prefix cache, and on other meshes."""
    with engine(method, 3) as llm:
        cold = acceptance(llm)
        assert cold[0] > 0.6
        assert acceptance(llm) == pytest.approx(cold, abs=0.01)
        assert scheduler_of(llm).pages.num_hit_tokens > 0
        for mesh in ("tensor=2", "stage=2", "tensor=1"):
            assert llm.reshard(mesh).num_pages > 0
            assert acceptance(llm) == pytest.approx(cold, abs=0.01), mesh
            assert scheduler_of(llm).pages.num_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_acceptance_is_the_same_with_preemption(method: str) -> None:
    with engine(method, 3) as llm:
        cold = acceptance(llm)
    with engine(method, 3, num_gpu_blocks_override=24) as llm:  # where pages are few, so are the drafts of a row
        assert acceptance(llm)[0] == pytest.approx(cold[0], abs=0.01)
        assert scheduler_of(llm).num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PAIRS, "ngram", "suffix"])
def test_acceptance_is_the_same_after_many_other_requests(method: str) -> None:
    """And memory is: of the process, of the devices, and pages."""
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 640, "compile_sizes": {"decode": [64], "mixed": [640]}}
    with engine(method, 3, **sizes, num_gpu_blocks_override=400) as llm:
        cold = acceptance(llm)
        run_others(llm, NUM_OTHERS // 2, 1)
        earlier = in_use()
        run_others(llm, NUM_OTHERS // 2, 2)
        num_bytes, num_objects, num_arrays = in_use() - earlier
        assert num_bytes < 16 * MEGABYTE and num_objects < 1000 and num_arrays <= 0
        allocator = scheduler_of(llm).allocator
        assert allocator.num_free == allocator.num_pages
        assert acceptance(llm) == pytest.approx(cold, abs=0.01)
