"""Trained draft heads (``tests/demo_drafters``): their logits are those that NumPy alone reads from the files.

So are the states of the model that they read. Verification hides a head that is run wrongly.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.demo import MODEL_DIRECTORY, tasks
from jaxserve.models.loading import load_model
from jaxserve.text.tokenizer import load_tokenizer
from tests import draft_heads
from tests.draft_heads import Tensors, load_head
from tests.head_pairs import LONGEST
from tests.jaxserve.test_draft_heads import assert_drafts, drafted
from tests.jaxserve.test_head_requests import seen_states

DRAFTERS = Path(__file__).resolve().parent.parent / "demo_drafters"
ITEMS = [item for task in tasks.TASKS for item in tasks.held_out(task, 2, seed=6)]
TEXTS = [tasks.completion_prompt(item) + tasks.completion_answer(item) for item in ITEMS]


class Reading(NamedTuple):
    """A trained head as NumPy reads it.

    Attributes:
        states: Returns the states of tokens that the target has seen.
        drafts: Returns logits, and the states of drafted tokens, for tokens and the states before them.
    """

    states: Callable[[np.ndarray], np.ndarray]
    drafts: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def read_eagle3(model: Path, directory: Path) -> Reading:
    target, head = tensors_of(model), tensors_of(directory)
    config, table = config_of(directory), target["model.embed_tokens.weight"]
    aux_layers, head_dim = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], config_of(model)["head_dim"]

    def states(tokens: np.ndarray) -> np.ndarray:
        inputs = draft_heads.llama_states(target, head_dim, tokens)
        return draft_heads.eagle3_states(head, config, np.concatenate([inputs[layer] for layer in aux_layers], 1))

    def drafts(tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = draft_heads.eagle3_hidden(head, config, table[tokens], states, 0)
        return draft_heads.eagle3_logits(head, hidden, len(table)), draft_heads.eagle3_fed_back(head, config, hidden)

    return Reading(states, drafts)


def read_mtp(model: Path, _: Path) -> Reading:
    tensors, config = tensors_of(model), config_of(model)
    table = tensors["model.embed_tokens.weight"]

    def states(tokens: np.ndarray) -> np.ndarray:
        return draft_heads.norm(
            draft_heads.deepseek_states(tensors, config, tokens)[-1], tensors["model.norm.weight"], 1e-6
        )

    def drafts(tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = draft_heads.mtp_hidden(tensors, config, table[tokens], states, 0)
        return draft_heads.mtp_logits(tensors, config, found)

    return Reading(states, drafts)


def tensors_of(directory: Path) -> Tensors:
    stored = load_file(directory / "model.safetensors")
    return {name: each if each.dtype.kind in "ib" else each.astype(np.float64) for name, each in stored.items()}


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def before(states: np.ndarray) -> np.ndarray:
    """The state of the token before each; zeros for the first."""
    return np.concatenate([np.zeros_like(states[:1]), states[:-1]])


READINGS = {
    "eagle3": (read_eagle3, MODEL_DIRECTORY, DRAFTERS / "eagle3"),
    "mtp": (read_mtp, DRAFTERS / "mtp", DRAFTERS / "mtp"),
}


@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_trained_head_drafts_what_its_files_say(method: str) -> None:
    """After each token of a text, from the target's states before it; and after a token that it has drafted itself."""
    read, model, directory = READINGS[method]
    reading, tokenizer = read(model, directory), load_tokenizer(model)
    target, head = load_model(model, "float32"), load_head(method, directory, model)
    num_right, num_drafts = 0, 0
    for text in TEXTS:
        tokens = np.array(tokenizer.encode(text))
        padded = np.pad(tokens, (0, LONGEST - len(tokens)))
        seen = seen_states(target, head, padded)[: len(tokens)]
        expected = reading.states(tokens)
        np.testing.assert_allclose(seen, expected, atol=1e-4, rtol=1e-5)
        logits, after = drafted(head, target, tokens, jnp.asarray(before(seen)))
        assert_drafts((logits, after), reading.drafts, tokens, before(expected))
        num_right += int((logits[:-1].argmax(-1) == tokens[1:])[-4:].sum())
        num_drafts += 4
    assert num_right > num_drafts / 2, "it guesses answers: other states would be as good for a head that does not"
