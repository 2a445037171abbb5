"""Requests of all kinds on meshes over several processes: what one process with as many devices gives."""

import json
from pathlib import Path
from typing import Any

import pytest

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
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "vocab_size": 360, "max_position_embeddings": 128, "num_key_value_heads": 4},
    "sparse": {**SPARSE, "num_key_value_heads": 4},
    "deepseek": {**DEEPSEEK, "vocab_size": 360, "max_position_embeddings": 128},
    "gpt_oss": {
        **LLAMA,
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 360,
        "max_position_embeddings": 128,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {"mesh": "tensor=2"}),
    ("llama", 2, {"mesh": "tensor=4", "async_scheduling": False}),
    ("llama", 4, {"mesh": "tensor=4"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "split_logits"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "sequence_parallel"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "replicated_attention"}),
    ("llama", 2, {"mesh": "tensor=4", "layout": "context_parallel"}),
    ("llama", 2, {"mesh": "tensor=2", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ("sparse", 2, {"mesh": "tensor=4", "enable_expert_parallel": True}),
    ("sparse", 2, {"mesh": "tensor=2,expert=2"}),
    ("sparse", 2, {"mesh": "expert=4"}),
    ("sparse", 4, {"mesh": "tensor=2,expert=2", "layout": "expert_all_to_all"}),
    ("sparse", 2, {"mesh": "tensor=2,expert=2", "layout": "expert_all_reduce"}),
    ("sparse", 2, {"mesh": "expert=2", "expert_load_metrics": 1}),
    ("deepseek", 2, {"mesh": "tensor=2,expert=2"}),
    ("deepseek", 2, {"mesh": "tensor=4"}),
    ("gpt_oss", 2, {"mesh": "tensor=2,expert=2", "num_gpu_blocks_override": 32}),
    ("gpt_oss", 2, {"mesh": "tensor=4", "num_gpu_blocks_override": 32}),
    ("llama", 2, {"mesh": "stage=2", "async_scheduling": False}),
    ("llama", 2, {"mesh": "stage=2", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ("sparse", 2, {"mesh": "stage=2", "expert_load_metrics": 1}),
    ("sparse", 4, {"mesh": "stage=2,expert=2", "expert_load_metrics": 1, "async_scheduling": False}),
    *(
        (shape, count, {"mesh": mesh, "num_gpu_blocks_override": 32})
        for shape in SHAPES
        for mesh in ("stage=4", "stage=2,tensor=2", "stage=2,expert=2")
        for count in (2, 4)
        if shape != "llama" or "expert" not in mesh
    ),
]


@pytest.mark.parametrize(("shape", "count", "settings"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_processes_give_what_one_gives(shape: str, count: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Texts, tokens and finish reasons are equal; logprobs and vectors but for the last bits."""
    model = tmp_path / "model"
    model.mkdir()
    config = {**SHAPES[shape]}
    if settings["mesh"] == "stage=4":
        config |= {"num_hidden_layers": 4, "layer_types": config.get("layer_types", []) * 2 or None}
    write_checkpoint_with_tokenizer(model, config, seed=7)
    arguments = {"model": str(model), **SETTINGS, **settings, "compilation_cache_dir": str(PROGRAMS_CACHE)}
    found = outcomes_of_group(arguments, count, tmp_path)
    started = start(arguments)
    expected = json.loads(json.dumps(run_requests(started)))
    started.engine.close()
    assert len({str(each[0]) for each in expected}) > 10, "the requests do not all give the same"
    for (mine, my_scores, my_vector), (theirs, scores, vector) in zip(found, expected, strict=True):
        assert mine == theirs
        assert my_scores == pytest.approx(scores, abs=1e-3)
        assert my_vector == (vector if vector is None else pytest.approx(vector, abs=1e-3))
