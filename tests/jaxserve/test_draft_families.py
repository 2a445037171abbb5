"""Families as draft models of themselves and of each other: windows, latents, experts, layers that share pages."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.api.request import parse_prompt
from jaxserve.device.build import plan_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup import start_engine
from tests.jaxserve.test_draft_model import SETTINGS, counts, drafting
from tests.jaxserve.test_kv_window import MIXED
from tests.random_checkpoint import DEEPSEEK, LLAMA, SHARING, write_checkpoint

WINDOWED: dict[str, Any] = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixed": {**MIXED, "vocab_size": LLAMA["vocab_size"]},
    "latents": DEEPSEEK,
    "sharing": SHARING,
    "windowed": WINDOWED,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each family."""
    directories = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for seed, (name, config) in enumerate(FAMILIES.items()):
        write_checkpoint(directories[name], config, seed)
    return directories


def tokens(engine: Engine) -> list[list[int]]:
    """What requests with a prompt of several chunks return, twice: then from cached pages."""
    states = []
    for _ in range(2):
        for index in range(3):
            params = SamplingParams(temperature=float(index > 0), seed=index, max_tokens=24, ignore_eos=True)
            request = parse_prompt({"prompt_token_ids": [*range(3, 33 + index)]}, params)
            states.append(engine.submit(dataclasses.replace(request, request_id=str(len(states)))))
        while engine.num_unfinished or any(replica.has_steps_in_flight for replica in engine.replicas):
            engine.step()
    return [list(state.output().outputs[0].token_ids) for state in states]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "drafter"),
    [*((name, name) for name in FAMILIES), ("latents", "llama")],
)
def test_any_family_drafts(model: str, drafter: str, checkpoints: dict[str, Path]) -> None:
    """Always right where it is the model itself, also beyond its windows and from cached pages."""
    found = []
    for drafts in ({}, drafting(checkpoints[drafter])):
        engine = start_engine(EngineConfig(**{**SETTINGS, "model": str(checkpoints[model])}, **drafts)).engine
        found.append(tokens(engine))
        num_drafts, num_accepted = counts(engine)
        engine.close()
    assert found[1] == found[0]
    assert num_drafts > 0 and (num_accepted == num_drafts or model != drafter)


def test_pages_outside_of_windows_are_freed(checkpoints: dict[str, Path]) -> None:
    """So a draft model may not need them."""
    with pytest.raises(ConfigError, match=r"llama\S* sees more than the latest 16 tokens, but all layers"):
        plan_engine(
            EngineConfig(**{**SETTINGS, "model": str(checkpoints["windowed"])}, **drafting(checkpoints["llama"]))
        )
