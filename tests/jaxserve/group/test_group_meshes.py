"""Requests of all kinds on meshes over several processes: what one process with as many devices gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config_checks import parse_mesh
from tests.group_driver import outcomes_of_group, run_requests, start
from tests.jaxserve.test_lanes import CONFIG as SPARSE
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint_with_tokenizer
from tests.server_process import PROGRAMS_CACHE

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "block_size": 8,
    "num_gpu_blocks_override": 24,
    "compile_sizes": {"decode": [2, 4], "mixed": [48]},
    "seed": 3,
}
ALIKE: dict[str, Any] = {"vocab_size": 360, "max_position_embeddings": 128, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **ALIKE},
    "sparse": {**SPARSE, "num_key_value_heads": 4},
    "mixtral": {
        **LLAMA,
        **ALIKE,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek": {**DEEPSEEK, "vocab_size": 360, "max_position_embeddings": 128},
    "gpt_oss": {
        **LLAMA,
        **ALIKE,
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
MESHES = ("tensor=4", "expert=4", "tensor=2,expert=2", "stage=4", "stage=2,tensor=2", "stage=2,expert=2")
"""Every mesh of four devices."""
FEW_PAGES = {"max_model_len": 64, "num_gpu_blocks_override": 12}
"""Too few for all requests, some of which are preempted."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2, "enable_adaptive_verification": False}
"""The model drafts for itself."""
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(
        (shape, count, {"mesh": mesh})
        for shape in SHAPES
        for mesh in MESHES
        for count in (2, 4)
        if shape != "llama" or "expert" not in mesh
    ),
    ("llama", 2, {"mesh": "tensor=2"}),
    ("llama", 2, {"mesh": "tensor=4", "async_scheduling": False}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "split_logits"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "sequence_parallel"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "replicated_attention"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "context_parallel"}),
    ("sparse", 2, {"mesh": "tensor=4", "enable_expert_parallel": True}),
    ("sparse", 4, {"mesh": "tensor=2,expert=2", "layout": "expert_all_to_all"}),
    ("sparse", 2, {"mesh": "tensor=2,expert=2", "layout": "expert_all_reduce"}),
    ("sparse", 2, {"mesh": "expert=2", "expert_load_metrics": 1}),
    ("deepseek", 2, {"mesh": "expert=4", "async_scheduling": False}),
    ("llama", 2, {"mesh": "tensor=2", "speculative_config": NGRAM}),
    ("llama", 2, {"mesh": "tensor=4", "async_scheduling": False, "speculative_config": NGRAM}),
    ("sparse", 2, {"mesh": "tensor=2,expert=2", "speculative_config": NGRAM}),
    ("llama", 2, {"mesh": "stage=2,tensor=2", "speculative_config": NGRAM}),
    ("deepseek", 2, {"mesh": "stage=2,expert=2", "speculative_config": NGRAM}),
    ("llama", 2, {"mesh": "tensor=4", "speculative_config": DRAFT_MODEL}),
    ("llama", 4, {"mesh": "tensor=4", "speculative_config": DRAFT_MODEL}),
    ("llama", 2, {"mesh": "stage=2,tensor=2", "speculative_config": DRAFT_MODEL}),
    ("sparse", 4, {"mesh": "stage=2,expert=2", "speculative_config": DRAFT_MODEL}),
    ("mixtral", 2, {"mesh": "tensor=2,expert=2", "speculative_config": DRAFT_MODEL}),
    ("llama", 2, {"mesh": "stage=4", "layout": "replicated"}),
    ("llama", 2, {"mesh": "stage=2,tensor=2", "layout": "split_logits"}),
    ("llama", 2, {"mesh": "stage=2,tensor=2", "layout": "sequence_parallel"}),
    ("llama", 2, {"mesh": "stage=2,tensor=2", "layout": "replicated_attention"}),
    ("sparse", 2, {"mesh": "stage=2,expert=2", "layout": "expert_all_to_all"}),
    ("llama", 2, {"mesh": "stage=2", "async_scheduling": False}),
    ("llama", 2, {"mesh": "stage=2", "speculative_config": NGRAM}),
    ("sparse", 2, {"mesh": "stage=2", "expert_load_metrics": 1}),
    ("sparse", 4, {"mesh": "stage=2,expert=2", "expert_load_metrics": 1, "async_scheduling": False}),
]


@pytest.mark.parametrize(("shape", "count", "settings"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_processes_give_what_one_gives(shape: str, count: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Texts, tokens and finish reasons are equal; logprobs and vectors too where at most two devices add, and else but
    for the last bits."""
    model = tmp_path / "model"
    model.mkdir()
    config = {**SHAPES[shape]}
    if settings["mesh"] == "stage=4":
        config |= {"num_hidden_layers": 4, "layer_types": config.get("layer_types", []) * 2 or None}
    write_checkpoint_with_tokenizer(model, config, seed=7)
    if settings.get("speculative_config") == DRAFT_MODEL:
        settings = {**settings, "speculative_config": {**DRAFT_MODEL, "model": str(model)}}
    if shape == "gpt_oss":
        settings = {**settings, "num_gpu_blocks_override": 16}
    arguments = {"model": str(model), **SETTINGS, **FEW_PAGES, **settings, "compilation_cache_dir": str(PROGRAMS_CACHE)}
    found = outcomes_of_group(arguments, count, tmp_path)
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts["jaxserve:num_preemptions"] > 0 and counts["jaxserve:prefix_cache_hits"] > 0, counts
    assert counts["jaxserve:compiles_after_ready"] == 0
    started = start(arguments)
    expected = json.loads(json.dumps(run_requests(started)))
    started.engine.close()
    assert len({str(each[0]) for each in expected}) > 10, "the requests do not all give the same"
    sizes = parse_mesh(settings["mesh"], {})
    num_adding = sizes["tensor_parallel_size"] * sizes["expert_parallel_size"]
    tolerance = 1e-3 if num_adding > 2 else 0.0
    for (mine, my_scores, my_vector), (theirs, scores, vector) in zip(found, expected, strict=True):
        assert mine == theirs
        assert my_scores == pytest.approx(scores, rel=0.0, abs=tolerance)
        assert my_vector == (vector if vector is None else pytest.approx(vector, rel=0.0, abs=tolerance))
