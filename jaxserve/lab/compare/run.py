"""Runs candidates on the devices of this machine, one engine after the other: their tokens, and times of steps."""

import contextlib
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, JaxserveError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.device.build import find_model
from jaxserve.lab.compare.candidates import Candidate
from jaxserve.lab.random_weights import has_weights, write_random_checkpoint
from jaxserve.llm import LLM
from pallas_kernels.registry import UnsupportedKernelError
from sharding import LayoutError, MeshError

FEW_TOKENS, MANY_TOKENS = 2, 18  # outputs of a short and a long run, whose difference is that of 16 decode steps
_FEWEST_REPEATS, _MOST_REPEATS, _LONG_ENOUGH_S = 5, 25, 2.0
_MOST_BATCHED_TOKENS = 4096
_PAGE_SIZE = 16

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """What a candidate did.

    Attributes:
        step_s: Seconds per decode step by batch size: of 16 steps the mean, of several runs the median.
        num_different: Prompts whose greedy tokens differ from those of the reference.
        num_prompts: Number of prompts.
        error: Why it could not run; "" if it ran.
    """

    step_s: dict[int, float]
    num_different: int
    num_prompts: int
    error: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether it ran, with the tokens of the reference."""
        return not self.error and self.num_different == 0


class RunSettings(NamedTuple):
    """How candidates are run.

    Attributes:
        batches: Batch sizes to measure.
        context: Tokens of context of each sequence in the middle of the measured steps.
        engine: Further settings of engines.
    """

    batches: tuple[int, ...]
    context: int
    engine: dict[str, Any]


Tokens = list[list[int]]


@contextlib.contextmanager
def with_weights(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield a directory with the model's weights, or with random ones in float32, and which of them it has."""
    directory = find_model(config)
    if has_weights(directory):
        yield str(directory), "the weights of the checkpoint"
        return
    with tempfile.TemporaryDirectory() as temporary:
        write_random_checkpoint(directory, Path(temporary), config.hf_overrides)
        yield temporary, "random weights"


def run_all(directory: str, candidates: Sequence[Candidate], settings: RunSettings) -> list[Measured]:
    """Run candidates one after the other; greedy tokens are compared with those of one device, or of the first
    candidate if one device cannot run the model."""
    reference: Tokens | None = None
    with contextlib.suppress(ConfigError):
        one = settings._replace(batches=settings.batches[-1:])
        reference, _ = _run(directory, {"mesh": "tensor=1"}, one, parts=1, times=False)
    found = []
    for candidate in candidates:
        sizes = candidate.plan.mesh
        parts = sizes["data"] * sizes["stage"] * candidate.plan.num_lanes
        layout = {"mesh": candidate.mesh, "layout": candidate.given}
        try:
            tokens, step_s = _run(directory, layout, settings, parts=parts, times=True)
        except (JaxserveError, LayoutError, MeshError, UnsupportedKernelError) as error:
            found.append(Measured({}, 0, settings.batches[-1], str(error)))
            continue
        reference = tokens if reference is None else reference
        num_different = sum(own != expected for own, expected in zip(tokens, reference, strict=True))
        found.append(Measured(step_s, num_different, len(tokens)))
        logger.info(
            "ran %s: %s", candidate.name, {batch: f"{1000 * time_s:.2f} ms" for batch, time_s in step_s.items()}
        )
    return found


def decode_seconds(directory: str, layout: dict[str, Any], settings: RunSettings, parts: int) -> dict[int, float]:
    """Return the time of a decode step of each batch size.

    Args:
        directory: Directory of the checkpoint.
        layout: Settings of the engine that say how it is split.
        settings: What to run.
        parts: Steps that requests are divided over.
    """
    return _run(directory, layout, settings, parts=parts, times=True)[1]


def _run(
    directory: str, layout: dict[str, Any], settings: RunSettings, *, parts: int, times: bool
) -> tuple[Tokens, dict[int, float]]:
    """Return greedy tokens of the largest batch, and the time per step of each batch."""
    step_s = dict[int, float]()
    try:
        with LLM(directory, **_engine_settings(settings, parts), **layout) as llm:
            prompts = _prompts(settings, llm.vocab_size)
            outputs = llm.generate(prompts, _params(MANY_TOKENS), use_tqdm=False)
            for batch in settings.batches if times else ():
                step_s[batch] = _step_seconds(llm, prompts[:batch])
            return [list(output.outputs[0].token_ids) for output in outputs], step_s
    finally:
        gc.collect()
        jax.clear_caches()  # the programs of an engine that is closed


def _engine_settings(settings: RunSettings, parts: int) -> dict[str, Any]:
    """Return settings for few programs and pages; requests are divided over ``parts`` steps."""
    largest = settings.batches[-1]
    length = settings.context + MANY_TOKENS
    tokens = max(largest, min(largest * _prompt_length(settings), _MOST_BATCHED_TOKENS))
    rows = sorted({-(-batch // parts) for batch in settings.batches} | {-(-largest // parts) * 2})
    return {
        "max_num_seqs": largest,
        "max_num_batched_tokens": tokens,
        "max_model_len": length,
        "num_gpu_blocks_override": 4 * largest * (-(-length // _PAGE_SIZE) + 1),
        "compile_sizes": {"decode": [min(size, largest) for size in rows], "mixed": [tokens]},
        **settings.engine,
    }


def _prompt_length(settings: RunSettings) -> int:
    """Return a length of full pages and one token, or less than a page: after the first run the pages are cached, and
    the times of runs differ by those of their decode steps alone."""
    longest = max(1, settings.context - (MANY_TOKENS + FEW_TOKENS) // 2)
    return longest if longest < _PAGE_SIZE else longest // _PAGE_SIZE * _PAGE_SIZE + 1


def _prompts(settings: RunSettings, vocab_size: int) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(0)
    shape = settings.batches[-1], _prompt_length(settings)
    return [{"prompt_token_ids": row} for row in generator.integers(0, vocab_size, shape).tolist()]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def _step_seconds(llm: LLM, prompts: list[dict[str, list[int]]]) -> float:
    """Return the time of a decode step: the difference between a short and a long run, divided by that of their
    lengths. Short steps are measured more often."""
    differences, spent = list[float](), 0.0
    while len(differences) < _FEWEST_REPEATS or (len(differences) < _MOST_REPEATS and spent < _LONG_ENOUGH_S):
        short, long = (_run_seconds(llm, prompts, num_tokens) for num_tokens in (FEW_TOKENS, MANY_TOKENS))
        differences.append(long - short)
        spent += long
    return max(statistics.median(differences), 0.0) / (MANY_TOKENS - FEW_TOKENS)


def _run_seconds(llm: LLM, prompts: list[dict[str, list[int]]], num_tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, _params(num_tokens), use_tqdm=False)
    return time.perf_counter() - start
