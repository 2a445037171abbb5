"""Check speculative decoding on the device: answers are those without drafts; and what drafts of known acceptance give.

Small random models answer without and with each method, in deterministic mode: tokens and log-probabilities must be
equal bit for bit. The 8B's shapes then decode with and without drafts, in one engine and in turns, as ``jaxserve bench
speculation --replay-acceptance`` does.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.gpu.engine import require_llguidance
from scripts.gpu.figures import Figure, rounded
from scripts.gpu.models import config_of
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError, Working
from scripts.gpu.workload import random_prompts
from scripts.gpu.wrong_results import WrongResultError

IS_ALONE: bool = True
ENVIRONMENT: dict[str, str] = {**AS_NEEDED, "JAX_COMPILATION_CACHE_DIR": ""}
METHODS = ("draft_model of itself", "draft_model", "eagle3", "mtp", "ngram", "suffix")
RATES = (0.8, 0.95, 0.0)
_SPEED = "speed of llama-8b"
_NUM_DRAFTS = 4
_VOCAB_SIZE = 360
_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
)
_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        **_SHAPE,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
    }
)
_REQUESTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"temperature": 0.0}),
    MappingProxyType({"temperature": 0.8, "top_p": 0.9, "seed": 5}),
)
_LENGTHS = (4, 10, 17, 22, 70, 5)  # of prompts
_START_LIMIT_S = 200.0
_UNTUNED = " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def items(context: Context) -> list[Item]:
    """List the methods, then the speed."""
    return [*(Item(f"answers with {method}", 50.0) for method in METHODS), Item(_SPEED, 200.0)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Compare the answers of a method with those without drafts, or measure the speed."""
    require_llguidance()
    if item == _SPEED:
        yield from _speed(context)
        return
    if not context.is_tiny:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + _UNTUNED
    yield from _answers(item.removeprefix("answers with "), context)


def programs(context: Context) -> Iterator[Program]:
    """List none: a dry run traces whole steps (``steps``)."""
    yield from ()


class Pair(NamedTuple):
    """A model and the settings of its drafts."""

    model: Path
    speculation: dict[str, Any]


def write_pair(folder: Path, method: str) -> Pair:
    """Write the checkpoints of a method (random numbers), sized for the kernels of a GPU."""
    from tests.draft_heads import HEAD, write_eagle3, write_mtp
    from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint, write_tokenizer

    model, drafter = folder / "target", folder / "drafter"
    for each in (model, drafter):
        each.mkdir(parents=True, exist_ok=True)
    if method == "mtp":
        write_mtp(model, {**DEEPSEEK, **_LATENT})
    else:
        write_checkpoint(model, {**LLAMA, **_SHAPE, "num_hidden_layers": 8}, 0)
    write_tokenizer(model)
    if method == "eagle3":
        write_eagle3(drafter, {**HEAD, **_SHAPE, "draft_vocab_size": 200})
    elif method == "draft_model":
        write_checkpoint(drafter, {**LLAMA, **_SHAPE}, 1)
    name = method.split()[0]
    speculation: dict[str, Any] = {"method": name, "num_speculative_tokens": _NUM_DRAFTS}
    if name in ("draft_model", "eagle3"):
        speculation["model"] = str(model if method.endswith("itself") else drafter)
    return Pair(model, speculation)


def _answers(method: str, context: Context) -> Iterator[Figure | Working]:
    """Compare tokens and log-probabilities."""
    from jaxserve import LLM
    from jaxserve.api.draft_totals import DraftTotals

    pair = write_pair(context.folder / f"model-drafts-{method.replace(' ', '-')}", method)
    settings: dict[str, Any] = {
        "dtype": "float32" if context.is_tiny else "bfloat16",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "deterministic": True,
    }
    yield Working("answering without drafts", _START_LIMIT_S)
    with LLM(str(pair.model), **settings) as alone:
        expected = [_answer(alone, request) for request in _REQUESTS]
    yield Working("answering with drafts", _START_LIMIT_S)
    speculation = {**pair.speculation, "enable_adaptive_verification": False}
    with LLM(str(pair.model), **settings, speculative_config=speculation) as drafting:
        found = [_answer(drafting, request) for request in _REQUESTS for _ in range(2)]
        drafts = DraftTotals.of(drafting.get_metrics())
    twice = [answers for answers in expected for _ in range(2)]
    different = sum(a != b for one, other in zip(twice, found, strict=True) for a, b in zip(one, other, strict=True))
    note = f"{drafts.num_accepted:.0f} of {drafts.num_tokens:.0f} drafts accepted"
    if method.endswith("itself") and drafts.num_accepted != drafts.num_tokens:
        raise WrongResultError(f"a model that drafts for itself: {note}")
    if different:
        raise WrongResultError(f"{different} of {len(found) * len(_LENGTHS)} answers differ; {note}")
    note = f"{len(found) * len(_LENGTHS)} answers with the same bits, from new pages and from the prefix cache; {note}"
    yield Figure(part="drafts", name=f"answers with {method}", value="pass", note=note)


def _answer(llm: Any, request: Mapping[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each prompt's completion, and their log-probabilities."""
    from jaxserve import SamplingParams

    prompts = [{"prompt_token_ids": [3 + 7 * i * length % 11 for i in range(length)]} for length in _LENGTHS]
    params = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False, logprobs=0, **request)
    found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (list(each.token_ids), [of[token].logprob for of, token in zip(each.logprobs, each.token_ids, strict=True)])
        for each in found
    ]


def _speed(context: Context) -> Iterator[Figure | Working]:
    """Decode with and without drafts of known acceptance, in pairs."""
    from jaxserve import LLM
    from jaxserve.bench.replay import Replay

    batches, num_tokens = ((1, 4), 16) if context.is_tiny else ((1, 8, 32), 256)
    directory = context.folder / "model-drafts-speed"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of("llama-8b", context.is_tiny)))
    most_tokens = 64 if context.is_tiny else 1024
    yield Working("starting the engine", _START_LIMIT_S)
    with LLM(
        str(directory),
        load_format="dummy",
        dtype="float32" if context.is_tiny else "bfloat16",
        max_num_seqs=max(batches),
        max_num_batched_tokens=most_tokens,
        max_model_len=most_tokens,
        compile_sizes={"decode": list(batches), "mixed": [most_tokens]},
        kv_cache_memory_bytes=(64 << 20) if context.is_tiny else (8 << 30),
        speculative_config={"method": "ngram", "num_speculative_tokens": _NUM_DRAFTS},
    ) as llm:
        for rate in RATES:
            replay = Replay(_NUM_DRAFTS, rate, llm.vocab_size)
            for batch in batches:
                if context.left_s() < 20:
                    raise SkippedError(f"the time limit was reached at acceptance {rate}, batch {batch}")
                yield Working(f"decoding {batch} requests", _START_LIMIT_S)
                yield _compared(llm, replay, rate, batch, num_tokens, 2 if context.is_tiny else 7)


def _compared(llm: Any, replay: Any, rate: float, batch: int, num_tokens: int, num_pairs: int) -> Figure:
    """Measure pairs of batches; the first one warms up."""
    from jaxserve.bench.speculation import median_interval

    prompts = random_prompts(batch, 16 if num_tokens < 100 else 128, llm.vocab_size, seed=batch)
    _, known = _timed(llm, None, prompts, num_tokens)
    times: dict[bool, list[float]] = {True: [], False: []}
    different, first_steps = 0, 0
    for pair in range(num_pairs):
        for prompt, output in zip(prompts, known, strict=True):
            replay.learn(prompt, output, pair)
        for drafts in (True, False) if pair % 2 else (False, True):
            before = _num_steps(llm)
            seconds, outputs = _timed(llm, replay if drafts else None, prompts, num_tokens)
            if pair:
                times[drafts].append(seconds)
                first_steps += drafts * (_num_steps(llm) - before)
                different += sum(a != b for a, b in zip(known, outputs, strict=True))
    found = median_interval([a / b for a, b in zip(times[False], times[True], strict=True)])
    steps = first_steps / max(num_pairs - 1, 1)
    note = f"95 % interval {found.low:.3f} to {found.high:.3f} of {num_pairs - 1} pairs; {num_tokens} tokens in "
    note += f"{statistics.median(times[False]):.3f} s without drafts, in {steps:.0f} steps and "
    note += f"{statistics.median(times[True]):.3f} s with; {different} outputs differ (not deterministic mode)"
    name = f"llama-8b: speed with {_NUM_DRAFTS} drafts of acceptance {rate}, batch {batch}"
    return Figure(part="drafts", name=name, value=rounded(found.median), unit="times that without", note=note)


def _timed(llm: Any, proposer: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Decode with a proposer, or none; return the seconds and the tokens."""
    from jaxserve import SamplingParams

    for replica in llm.engine.replicas:
        for scheduler in replica.schedulers:
            scheduler.proposer = proposer
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def _num_steps(llm: Any) -> int:
    return sum(replica.num_steps for replica in llm.engine.replicas)
