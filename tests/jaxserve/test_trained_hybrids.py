"""Trained models with recurrent layers (``tests/demo_hybrids``): they answer the demo's tasks, however they are run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams, load_model
from jaxserve.bench.accuracy import demo_accuracy
from jaxserve.demo import tasks
from scripts.demo.hybrids import HYBRIDS, IS_RECURRENT, config, part_of, weight_shapes
from scripts.demo.training_text import Batch, chat_example

MODELS = Path(__file__).resolve().parent.parent / "demo_hybrids"
FAMILIES = sorted(HYBRIDS)
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 96,
    "block_size": 8,
    "num_gpu_blocks_override": 2000,
    "compile_sizes": {"decode": [16], "mixed": [512]},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
PROMPTS = [tasks.completion_prompt(item) for task in tasks.TASKS for item in tasks.held_out(task, 25, seed=3)]


def texts_of(llm: LLM) -> tuple[list[list[int]], int]:
    """The greedy completions of all prompts, and how many prompt tokens came from the prefix cache."""
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found], sum(each.num_cached_tokens or 0 for each in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_are_what_the_training_script_writes(name: str) -> None:
    stored = load_file(MODELS / name / "model.safetensors")
    assert {key: each.shape for key, each in stored.items()} == weight_shapes(HYBRIDS[name])
    assert {each.dtype.name for each in stored.values()} == {"bfloat16"}
    assert json.loads((MODELS / name / "config.json").read_text()) == config(HYBRIDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_most_likely_tokens_are_the_answers(name: str) -> None:
    """Of a module on its own, for 6 questions of each task."""
    items = [item for task in tasks.TASKS for item in tasks.held_out(task, 6, seed=5)]
    batch = Batch(len(items))
    for row, item in enumerate(items):
        batch.put(row, 0, chat_example(item), row + 1)
    logits = load_model(MODELS / name)(batch.token_ids)
    assert batch.num_wrong(np.argmax(logits, axis=-1)) <= 0.05 * len(items)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_right(name: str) -> None:
    """To 250 held-out questions of each task in both forms."""
    with LLM(str(MODELS / name), **SETTINGS) as llm:
        found = demo_accuracy(llm, 250)
    assert all(share >= 0.95 for forms in found.values() for share in forms.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_need_the_recurrent_layers(name: str, tmp_path: Path) -> None:
    """Without what they add to the text's states, hardly any answer is right."""
    for file in (MODELS / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    for layer, is_recurrent in enumerate(IS_RECURRENT):
        if is_recurrent:
            stored[f"model.layers.{layer}.{part_of(HYBRIDS[name], layer).module}.out_proj.weight"][:] = 0
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = demo_accuracy(llm, 25)
    assert np.mean([share for forms in found.values() for share in forms.values()]) < 0.2, found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_same_from_the_prefix_cache_and_in_chunks(name: str) -> None:
    """Prompts go on from a checkpoint of their states, or come a few tokens at a time."""
    with LLM(str(MODELS / name), **SETTINGS) as llm:
        cold, _ = texts_of(llm)
        again, num_cached = texts_of(llm)
    assert num_cached > 5 * len(PROMPTS)
    assert again == cold
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "compile_sizes": {"decode": [4], "mixed": [8]}}
    with LLM(str(MODELS / name), **SETTINGS | small) as llm:
        chunked, _ = texts_of(llm)
        again, num_cached = texts_of(llm)
    assert num_cached > 5 * len(PROMPTS)
    assert again == chunked == cold
