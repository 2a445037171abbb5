"""Checkpoints of the rows of ``test_models.py`` and its siblings, made once, with tokens where they are asked."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.jaxserve import test_models as models
from tests.jaxserve.test_models import Checkpoint, Row

Maker = Callable[[str], Checkpoint]
"""Returns the checkpoint of a row, given its name."""


def saved_checkpoints(rows: Mapping[str, Row], make_hf: Callable[[Row], Any], factory: pytest.TempPathFactory) -> Maker:
    """Return what makes checkpoints without tokens, which take transformers longest.

    Args:
        rows: The rows by name.
        make_hf: Makes transformers' model of a row.
        factory: Makes their folders.
    """
    pytest.importorskip("torch").set_num_threads(1)

    @functools.cache
    def make(name: str) -> Checkpoint:
        row, directory = rows[name], factory.mktemp(name)
        model = make_hf(row)
        models.save(model, row, directory)
        return Checkpoint(directory, model, models.prompts(model.config.get_text_config().vocab_size), [])

    return make


def with_greedy_tokens(rows: Mapping[str, Row], saved: Maker) -> Maker:
    """Return what adds transformers' greedy tokens to saved checkpoints of these rows."""

    @functools.cache
    def make(name: str) -> Checkpoint:
        made = saved(name)
        expected = [models.greedy(rows[name], made.model, prompt) for prompt in made.prompts]
        return dataclasses.replace(made, expected=expected)

    return make
