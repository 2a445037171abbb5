"""Quantized weights that stay as they are in the file: what the engine computes with them, moves and plans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.models.loading import read_model_config
from jaxserve.models.stored_forms import read_forms
from tests.jaxserve.test_quantized_checkpoints import DENSE, FUSED, QWEN, write
from tests.quantized_cases import CASES

STORED, DECODED = {"quantization_config": {"weights": "stored"}}, {"quantization_config": {"weights": "decoded"}}
COMMON: dict[str, Any] = {
    **{"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8},
    **{"num_gpu_blocks_override": 24},
}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
NOT_KEPT = ("gptq act-order", "gptq act-order, 3 bits", "nf4, blocks across rows")


def generated(llm: LLM) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]


def check_same(found: list[Any], expected: list[Any]) -> None:
    """The same tokens, and log-probabilities within what the order of sums explains."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, own in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(
                [mine[token].logprob for token in sorted(mine)], [own[token].logprob for token in sorted(own)], atol=1e-4
            )


def compared(folder: Path, model: dict[str, Any], case: str, **settings: Any) -> None:
    _, quantized = write(folder, model, CASES[case])
    outputs = []
    for choice in (DECODED, STORED):
        with LLM(str(quantized), warm_up=False, **COMMON, **choice, **settings) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_KEPT])
def test_stored_weights_compute_what_decoded_ones_do(case: str, tmp_path: Path) -> None:
    compared(tmp_path, {**DENSE, "num_hidden_layers": 1}, case, tensor_parallel_size=2)
