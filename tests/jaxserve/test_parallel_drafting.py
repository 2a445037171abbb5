"""A draft model that guesses all tokens in one pass: its drafts are those of a whole text with mask tokens behind."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.device.build import plan_engine
from jaxserve.device.drafting import trace_drafts
from jaxserve.device.runner import LocalRunner
from jaxserve.device.step_batch import LatestTokens
from jaxserve.engine.engine import Engine
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import start_engine
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.loading import load_model
from jaxserve.scheduling.draft_passes import DraftPasses
from tests.draft_heads import HEAD, write_eagle3
from tests.jaxserve.test_draft_model import (
    MESHES,
    NUM_DRAFTS,
    OTHERS,
    PLAIN,
    SETTINGS,
    answers,
    compiles,
    content,
    counts,
    drafting,
)
from tests.random_checkpoint import write_checkpoint

MASK = 17
IN_ONE_PASS: dict[str, Any] = {"parallel_drafting": True}


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The answers without drafts."""
    engine = start_engine(EngineConfig(**SETTINGS)).engine
    found = content(answers(engine, PLAIN + OTHERS))
    engine.close()
    return found


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with a mask token."""
    directory = tmp_path_factory.mktemp("itself") / "model"
    shutil.copytree(MODEL_DIRECTORY, directory)
    return with_mask(directory)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's vocabulary and a mask token."""
    directory = tmp_path_factory.mktemp("another")
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    write_checkpoint(directory, config | sizes | {"num_key_value_heads": 2, "torch_dtype": "float32"}, seed=2)
    for path in MODEL_DIRECTORY.glob("*token*.json"):
        shutil.copy(path, directory)
    return with_mask(directory)


def with_mask(directory: Path, **named: Any) -> Path:
    """Add a mask token to a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (named or {"pard_token": MASK})))
    return directory


def first_drafts(engine: Engine) -> tuple[int, int]:
    """How often a first draft was verified, and accepted."""
    found = [scheduler.draft_counts for replica in engine.replicas for scheduler in replica.schedulers]
    return sum(each.num_drafts for each in found), sum(each.num_accepted[0] for each in found)


def latest_tokens(engine: Engine) -> LatestTokens:
    """What the device has of each slot."""
    runner = engine.replicas[0].runner
    assert isinstance(runner, LocalRunner)
    return runner._stages[-1].state.latest


@pytest.fixture(scope="module")
def with_another(another: Path) -> Iterator[Engine]:
    """The demo model with the random draft model."""
    engine = start_engine(EngineConfig(**SETTINGS, **drafting(another, **IN_ONE_PASS))).engine
    yield engine
    assert compiles(engine) == 0
    engine.close()


def test_drafts_are_those_of_the_whole_text_with_mask_tokens_behind(another: Path) -> None:
    """Wherever a text ends, whatever was rejected, computed in chunks or cached on the way."""
    settings = drafting(another, **IN_ONE_PASS, draft_sample_method="greedy")
    engine, model = start_engine(EngineConfig(**SETTINGS, **settings)).engine, load_model(another)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
    whole = answers(engine, [sampled])[0]
    text = [*(whole.prompt_token_ids or []), *whole.outputs[0].token_ids]
    num_prompt, positions = len(text) - 24, set[int]()
    for stop in dict.fromkeys(text[num_prompt:]):
        params = dataclasses.replace(sampled, stop_token_ids=[stop])
        assert answers(engine, [params], keeps_cache=stop % 2 == 0)[0].outputs[0].finish_reason == "stop"
        latest = latest_tokens(engine)
        assert latest.drafts is not None
        for slot in np.flatnonzero(np.asarray(latest.positions) >= num_prompt):
            position = int(latest.positions[slot])
            assert latest.token_ids[slot] == text[position]
            positions.add(position)
            masked = [*text[: position + 1], *[MASK] * (NUM_DRAFTS - 1)]
            possible = min(NUM_DRAFTS, len(text) - position)
            expected = np.asarray(model(jnp.array([masked])))[0, position : position + possible].argmax(-1)
            assert latest.drafts[slot][:possible].tolist() == expected.tolist()
    assert len(positions) > 5
    engine.close()


@pytest.mark.slow
def test_a_draft_model_changes_no_answer_in_one_pass(with_another: Engine, expected: list[Any]) -> None:
    assert content(answers(with_another, PLAIN + OTHERS)) == expected
    num_drafts, num_accepted = counts(with_another)
    assert 0 < num_accepted < num_drafts


@pytest.mark.parametrize("settings", MESHES, ids=str)
def test_first_drafts_of_the_model_itself_are_always_right(
    settings: dict[str, Any], itself: Path, expected: list[Any]
) -> None:
    """What mask tokens left in its pages is never seen again; also with cached prefixes and preemption."""
    engine = start_engine(EngineConfig(**SETTINGS, **settings, **drafting(itself, **IN_ONE_PASS))).engine
    assert content(answers(engine, PLAIN)) == expected[: len(PLAIN)]
    assert content(answers(engine, PLAIN, keeps_cache=True)) == expected[: len(PLAIN)]
    (tried, right), has_few_pages = first_drafts(engine), "num_gpu_blocks_override" in settings
    assert 0 < tried and (tried - right < 4 if has_few_pages else tried == right), "a latest token may have no page yet"
    assert counts(engine)[1] < counts(engine)[0], "it has not learned to guess at mask tokens"
    schedulers = [scheduler for replica in engine.replicas for scheduler in replica.schedulers]
    assert has_few_pages == any(scheduler.num_preemptions for scheduler in schedulers)
    assert compiles(engine) == 0
    engine.close()


@pytest.mark.slow
def test_first_drafts_are_right_however_many_there_are(
    itself: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.cycle([3, 0, 0, 2, 1, 0, 3])
    monkeypatch.setattr(DraftPasses, "choose", lambda *_: next(numbers))
    engine = start_engine(EngineConfig(**SETTINGS, **drafting(itself, **IN_ONE_PASS))).engine
    assert content(answers(engine, PLAIN)) == expected[: len(PLAIN)]
    tried, right = first_drafts(engine)
    assert 0 < tried == right
    engine.close()


@pytest.mark.slow
def test_a_draft_model_with_masks_moves_to_another_mesh(itself: Path, expected: list[Any]) -> None:
    config = EngineConfig(**SETTINGS, **drafting(itself, **IN_ONE_PASS))
    started = start_engine(config)
    assert content(answers(started.engine, PLAIN)) == expected[: len(PLAIN)]
    resharder = Resharder(config, started)
    for mesh in ("tensor=2", "stage=2", "tensor=1"):
        assert resharder.reshard(mesh, None).num_pages > 0
        assert content(answers(started.engine, PLAIN, keeps_cache=True)) == expected[: len(PLAIN)]
    tried, right = first_drafts(started.engine)
    assert 0 < tried == right
    started.engine.close()


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_the_draft_model_is_read_once(in_one_pass: bool, another: Path) -> None:
    config = EngineConfig(**SETTINGS, **drafting(another, parallel_drafting=in_one_pass))
    planned = plan_engine(config)
    shape = planned.buckets.shapes()[0]
    with mock.patch.object(CausalLM, "hidden", autospec=True, side_effect=CausalLM.hidden) as hidden:
        trace_drafts(planned.models[-1], shape)
    assert hidden.call_count == (1 if in_one_pass else 2), "the second is in a loop"


@pytest.mark.parametrize(
    ("named", "keys", "message"),
    [
        ({"pard_token": None}, IN_ONE_PASS, "parallel_drafting: .* one token in a pass, as .* pard_token"),
        ({"pard_token": 360}, IN_ONE_PASS, "pard_token: expected a token from 0 to 359, got 360"),
        ({"pard_token": None, "mask_token_id": True}, IN_ONE_PASS, "mask_token_id: expected a token .*, got True"),
        ({"pard_token": MASK}, {"parallel_drafting": 1}, "parallel_drafting: expected true or false, got 1"),
        ({}, {"parallel_drafting": True, "method": "ngram", "model": None}, "got 'parallel_drafting'"),
    ],
)
def test_what_cannot_draft_in_one_pass(
    named: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shutil.copytree(MODEL_DIRECTORY, tmp_path / "model")
    directory = with_mask(tmp_path / "model", **named)
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(**SETTINGS, **drafting(directory, **keys)))


def test_a_head_without_a_mask_token_cannot(tmp_path: Path) -> None:
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "hidden_size")}
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    write_eagle3(tmp_path, {**HEAD, **sizes, **layers}, mask_size=3 * sizes["hidden_size"])
    keys = {**drafting(tmp_path, **IN_ONE_PASS)["speculative_config"], "method": "eagle3"}
    with pytest.raises(ConfigError, match="parallel_drafting: .* one token in a pass, as .* ptd_token_id"):
        plan_engine(EngineConfig(**SETTINGS, speculative_config=keys))
    with_mask(tmp_path, ptd_token_id=MASK)
    drafter = plan_engine(EngineConfig(**SETTINGS, speculative_config=keys)).models[-1].drafter
    assert drafter is not None and drafter.mask_token == MASK
    alone = plan_engine(EngineConfig(**SETTINGS, speculative_config={**keys, "parallel_drafting": False}))
    assert alone.models[-1].drafter is not None and alone.models[-1].drafter.mask_token is None
