"""Attention over latents in the dtype that its checkpoints have."""

from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from tests.random_checkpoint import DEEPSEEK, write_checkpoint

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, "kv_cache_memory_bytes": 1 << 20}


def test_latents_run_in_bfloat16(tmp_path: Path) -> None:
    """Also with several rows at once, which XLA multiplies by another path than one."""
    write_checkpoint(tmp_path, DEEPSEEK, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 5, 21)]
    found = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(str(tmp_path), dtype=dtype, **SETTINGS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found[dtype] = [output.outputs[0].cumulative_logprob for output in outputs]
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.2)
