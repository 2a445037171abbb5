"""Mixtures of experts on native kernels: a request's bits do not depend on its batch, and no setting asks for that."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from tests.hooks import layer_tile, plan_only, why_no_native_kernels, write_checkpoint

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 36,
        "decoder_sparse_step": 1,
    },
    "granite-moe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.37,
        "logits_scaling": 2.0,
    },
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "max_model_len": 128,
    "compile_sizes": {"decode": [8, 16], "mixed": [16, 32]},
    "warm_up": False,
}
FAMILIES["gpt-oss"] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
}
START = [7, 3, 96, 40, 41, 5, 5, 18, 60, 2]
PROMPTS = [[*START, i, *range(i, 5 * i, 3)] for i in range(13)]
PARAMS = [
    SamplingParams(max_tokens=9, logprobs=3, temperature=0 if i % 2 else 1.0, top_p=0.9, seed=i) for i in range(13)
]


def bits(output: RequestOutput) -> list[Any]:
    """Tokens, and every log-probability."""
    (sample,) = output.outputs
    tables = sample.logprobs or []
    return [sample.token_ids, [(token, entry.logprob) for table in tables for token, entry in table.items()]]


@pytest.mark.skipif(why_no_native_kernels() is not None, reason="needs native kernels")
@pytest.mark.parametrize(
    "family, tensor",
    [
        ("qwen2-moe", 1),
        ("mixtral", 2),
        *[pytest.param(*pair, marks=pytest.mark.slow) for pair in (("qwen2-moe", 2), ("mixtral", 1))],
        *[pytest.param(name, size, marks=pytest.mark.slow) for name in ("granite-moe", "gpt-oss") for size in (1, 2)],
    ],
)
def test_bits_alone_and_in_any_batch(
    family: str, tensor: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy and seeded: alone, together in chunks with a shared prefix, from cached pages, and in reverse."""
    write_checkpoint(tmp_path, BASE | FAMILIES[family], seed=5)
    with caplog.at_level("INFO"), LLM(str(tmp_path), **SETTINGS, tensor_parallel_size=tensor, kernels="native") as llm:
        assert "Results are batch-invariant: native kernels compute each row separately" in caplog.text
        assert layer_tile(llm) is None
        alone = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            llm.reset_prefix_cache()
            alone += map(bits, llm.generate([prompt], params, use_tqdm=False))
        llm.reset_prefix_cache()
        assert [*map(bits, llm.generate(PROMPTS, PARAMS, use_tqdm=False))] == alone
        assert [*map(bits, llm.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False))] == alone[::-1]
    assert len({tuple(tokens) for tokens, _ in alone}) > 10


def test_lanes_that_add_in_an_order_of_their_own_promise_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, BASE | FAMILIES["mixtral"], seed=5)
    with caplog.at_level("INFO"):
        plan_only(tmp_path, expert_parallel_size=2)
    assert "Results are not batch-invariant" in caplog.text
