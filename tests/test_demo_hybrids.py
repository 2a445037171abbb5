"""The training script's forward passes of small hybrids, which sum over all tokens at once, are those of the engine."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.demo import tasks
from scripts.demo import conversion, hybrids, training_text
from scripts.demo.network import Rows

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 320,
    "max_model_len": training_text.ROW_TOKENS,
    "block_size": 8,
    "num_gpu_blocks_override": 200,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(hybrids.HYBRIDS))
def test_log_probabilities_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """Of several texts in a row, each of which begins with an empty state."""
    hybrid, generator = hybrids.HYBRIDS[name], np.random.default_rng(1)
    first = conversion.first_weights(hybrid, 0)
    hybrids.save(
        {key: each + 0.05 * generator.standard_normal(each.shape) for key, each in first.items()}, tmp_path, hybrid
    )
    stored = {key: each.astype(np.float32) for key, each in load_file(tmp_path / "model.safetensors").items()}
    items = [item for task in tasks.TASKS for item in tasks.held_out(task, 4, seed=7)]
    (batch,) = training_text.packed_batches((training_text.completion_example(item) for item in items), 16)
    forward = jax.jit(partial(hybrids.logits, hybrid=hybrid))
    scores = np.asarray(jax.nn.log_softmax(forward(stored, Rows.of(batch))))
    prompts, expected = list[Any](), list[np.ndarray]()
    for segment in range(1, batch.segments.max() + 1):
        rows, places = np.nonzero(batch.segments == segment)
        tokens = batch.token_ids[rows[0], places]
        prompts.append({"prompt_token_ids": tokens.tolist()})
        expected.append(scores[rows[0], places[:-1], tokens[1:]])
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output, known in zip(prompts, outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True)
        found = [each[token].logprob for each, token in pairs if each is not None]
        np.testing.assert_allclose(found, known, atol=1e-4)
