"""Drafters given as the model: their config.json names the model that they draft for."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.models.drafters.speculators import with_verifier
from tests.draft_heads import HEAD, as_speculators, write_eagle3
from tests.random_checkpoint import LLAMA

NAMED: dict[str, Any] = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}


def write(directory: Path, settings: dict[str, Any] | None, **changes: Any) -> str:
    """Writes a drafter, with these ``speculators_config``, for the model beside it."""
    target, drafter = directory / "target", directory / "drafter"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    named = settings and {"verifier": {"name_or_path": str(target)}, **settings}
    write_eagle3(drafter, as_speculators(HEAD, speculators_config=named, **changes))
    return str(drafter)


def test_a_drafter_alone_starts_the_model_that_it_names(tmp_path: Path) -> None:
    drafter = write(tmp_path, NAMED)
    found = with_verifier(EngineConfig(model=drafter, max_model_len=32))
    assert found.model == str(tmp_path / "target")
    assert found.max_model_len == 32
    assert found.speculative_config == {
        "method": "eagle3",
        "model": drafter,
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
        "draft_sample_method": "probabilistic",
        "parallel_drafting": False,
    }
    assert with_verifier(found) is found
    own = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 7, "draft_sample_method": "greedy"}
    assert (
        with_verifier(EngineConfig(model=drafter, speculative_config=own)).speculative_config or {}
    ).items() >= own.items()


WRONG: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    (
        {**NAMED, "verifier": {}},
        {},
        r"verifier\.name_or_path: expected the directory or hub id of the model that it drafts for, got None; give "
        r"that model as the model and .*drafter as speculative_config\.model",
    ),
    ({}, {}, r"proposal_methods\[0\]\.speculative_tokens: expected an integer from 1 on, got None"),
    (NAMED, {"speculators_model_type": "dflash"}, "speculators_model_type: expected eagle3 or peagle, got 'dflash'"),
]


@pytest.mark.parametrize(("settings", "changes", "message"), WRONG)
def test_drafters_that_cannot_start_alone(
    settings: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_verifier(EngineConfig(model=write(tmp_path, settings, **changes)))


def test_other_drafters_contradict_the_one_that_is_the_model(tmp_path: Path) -> None:
    drafter = write(tmp_path, NAMED)
    for drafts, key in (
        ({"method": "ngram", "num_speculative_tokens": 2}, "method: expected 'eagle3', got 'ngram'"),
        (
            {"method": "eagle3", "model": "other", "num_speculative_tokens": 2},
            "model: expected '.*drafter', got 'other'",
        ),
    ):
        with pytest.raises(
            ConfigError, match=rf"speculative_config\.{key}: the model .* is itself a drafter, for .*target"
        ):
            with_verifier(EngineConfig(model=drafter, speculative_config=drafts))
