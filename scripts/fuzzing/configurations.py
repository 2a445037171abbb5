"""Random engines of the fuzz test of speculative decoding."""

import dataclasses
import random
from typing import Any

from scripts.fuzzing.checkpoints import DRAFTERS, FAMILIES, MAX_LENGTH, WITH_EXPERTS

_TWO = {"tensor_parallel_size": 2}
_MESHES: tuple[dict[str, Any], ...] = (
    _TWO,
    {"tensor_parallel_size": 4},
    {"data_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2, "pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, **_TWO},
    {"layout": "split_logits", **_TWO},
    {"layout": "sequence_parallel", **_TWO},
    {"layout": "context_parallel", **_TWO},
    {"layout": "context_parallel", "pipeline_parallel_size": 2, **_TWO},
    {"layout": "sequence_parallel", "pipeline_parallel_size": 2, **_TWO},
)
_EXPERT_MESHES: tuple[dict[str, Any], ...] = (
    {"enable_expert_parallel": True, **_TWO},
    {"expert_parallel_size": 2, "layout": "expert_gather"},
    {"expert_parallel_size": 2, "layout": "expert_all_to_all"},
    {"expert_parallel_size": 2, "layout": "expert_all_reduce"},
    {"expert_parallel_size": 2, **_TWO},
    {"expert_parallel_size": 2, "pipeline_parallel_size": 2},
)
_RESHARDS = ("tensor=2", "stage=2", "data=2", "tensor=1")
_METHODS = (
    *("ngram", "suffix", "grammar", "replay", "replay", "draft_model", "draft_model"),
    *("eagle", "eagle3", "eagle3", "dflash", "mtp"),
)
_ON_HOST = ("ngram", "suffix", "grammar", "replay")
_REASONING = {"reasoning_parser": "think"}
NAN_PROCESSOR = "tests.faults.nan_processor:NAN_FROM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """An engine, without drafts and with them, and what happens to it.

    Attributes:
        seed: Seed of everything that is random.
        number: Number of the configuration.
        family: Family of the target.
        is_foreseeable: Whether its texts repeat themselves.
        settings: Settings of both engines, without the model.
        speculation: Settings of the drafts, without the model.
        drafter: Which draft model.
        replay: Rate at which drafts of the known text are right; None: the method's own drafts.
        reshard: Mesh to which both engines move in the middle; None: they stay.
        resets_cache: Whether prefix caches are cleared in the middle.
        concurrency: Most unfinished requests.
    """

    seed: int
    number: int
    family: str
    is_foreseeable: bool
    settings: dict[str, Any]
    speculation: dict[str, Any]
    drafter: str
    replay: float | None
    reshard: str | None
    resets_cache: bool
    concurrency: int

    @property
    def generator(self) -> random.Random:
        """A source of random numbers for the requests, always the same."""
        return random.Random(f"requests {self.seed} {self.number}")

    @property
    def moves_sums(self) -> bool:
        """Whether the engine moves in the middle to a mesh on which sums round otherwise."""
        return self.reshard is not None and self.reshard.startswith("tensor")


def draw(seed: int, number: int) -> Configuration:
    """Return the configuration with a number."""
    rng = random.Random(f"configuration {seed} {number}")
    method = rng.choice(_METHODS)
    family = {"mtp": "deepseek", "eagle3": "deep", "dflash": "deep"}.get(method) or rng.choice([*FAMILIES])
    meshes = _MESHES + _EXPERT_MESHES * 2 if family in WITH_EXPERTS else _MESHES
    mesh = rng.choice(meshes) if rng.random() < 0.55 else {}
    settings = {**_sizes(rng, mesh), **_kernels(rng), **mesh}
    settings["async_scheduling"] = rng.choice((True, True, False, None))
    settings["scheduling_policy"] = rng.choice(("fcfs", "priority"))
    settings["enable_prefix_caching"] = rng.random() < 0.75
    settings["logprobs_mode"] = rng.choice(
        ("raw_logprobs", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    )
    if rng.random() < 0.3:
        settings |= _REASONING
    if rng.random() < 0.25:
        settings["logits_processors"] = [NAN_PROCESSOR]
    return Configuration(
        seed=seed,
        number=number,
        family=family,
        is_foreseeable=rng.random() < 0.6,
        settings=settings,
        speculation=_speculation(rng, method),
        drafter=rng.choice([each for each in DRAFTERS if (each, family) != ("llama", "windowed")]),
        replay=rng.choice((1.0, 0.9, 0.7, 0.4, 0.0)) if method == "replay" else None,
        reshard=rng.choice(_RESHARDS) if not mesh and rng.random() < 0.3 else None,
        resets_cache=rng.random() < 0.2,
        concurrency=rng.choice((3, 8, 16)),
    )


def _sizes(rng: random.Random, mesh: dict[str, Any]) -> dict[str, Any]:
    """Return sizes of steps and pages, in many cases so few pages that requests are preempted."""
    num_rows, chunk = rng.choice((2, 4, 6)), rng.choice((16, 32, 48))
    page_size = 16 if mesh.get("layout") == "context_parallel" else rng.choice((8, 8, 16, 32))
    shared = -(-num_rows // mesh.get("pipeline_parallel_size", 1))
    sizes: dict[str, Any] = {
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": chunk,
        "max_model_len": MAX_LENGTH,
        "block_size": page_size,
        "compile_sizes": {"decode": [shared], "mixed": [chunk]},
        "long_prefill_token_threshold": rng.choice((0, 0, 8)),
        "compilation_cache_dir": "",
        "dtype": "float32",
    }
    return sizes | {"few_pages": rng.choice((1.0, 1.2, 1.6, None))}


def _kernels(rng: random.Random) -> dict[str, Any]:
    """Return settings of kernels; whatever computes, the engine is deterministic in most cases."""
    kernels = {"kernels": "xla"} if rng.random() < 0.25 else {}
    return {**kernels, "deterministic": rng.choice((True, True, None, None, False))}


def _speculation(rng: random.Random, method: str) -> dict[str, Any]:
    """Return settings of the drafts."""
    found: dict[str, Any] = {
        "method": "ngram" if method == "replay" else method,
        "num_speculative_tokens": rng.choice((1, 2, 3, 4, 4, 6, 9)),
        "enable_adaptive_verification": rng.random() < 0.35,
    }
    if method == "ngram":
        found |= {"prompt_lookup_min": rng.choice((1, 2)), "prompt_lookup_max": rng.choice((2, 3, 5))}
    if method == "suffix":
        found |= {
            "suffix_decoding_max_tree_depth": rng.choice((12, 24)),
            "suffix_decoding_max_cached_requests": rng.choice((0, 3, 10_000)),
            "suffix_decoding_max_spec_factor": rng.choice((1.0, 2.5)),
            "suffix_decoding_min_token_prob": rng.choice((0.0, 0.1)),
        }
    if method in ("draft_model", "eagle3"):
        found["parallel_drafting"] = rng.random() < 0.4
    if method not in _ON_HOST:
        found["draft_sample_method"] = rng.choice(("probabilistic", "probabilistic", "greedy"))
    return found
