"""What processes compare before they start: the first difference is named with the rank, the field and both values."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.group.differences import difference, least
from jaxserve.group.facts import early_facts, plan_facts
from tests.runners import plan_of_demo

NAMES = ["rank 0 (host a)", "rank 1 (host b)"]


def test_equal_facts_do_not_differ() -> None:
    facts = early_facts(EngineConfig(model="demo"))
    assert difference([facts, dict(facts)], NAMES) is None
    assert facts["setting tensor_parallel_size"] == "1" and "jax" in facts


def test_a_difference_is_named() -> None:
    facts = early_facts(EngineConfig(model="demo", seed=3))
    other = early_facts(EngineConfig(model="demo", seed=4))
    assert difference([facts, other], NAMES) == (
        "rank 1 (host b) differs from rank 0 (host a) in setting seed: 4 instead of 3"
    )
    assert (
        difference([{"jax": "1"}, {}], NAMES)
        == "rank 1 (host b) differs from rank 0 (host a) in jax: none instead of 1"
    )


def test_what_only_one_process_has_is_named_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is to run something else says other things; the setting that makes it so has two values."""
    facts, other = {"jax": "1", "setting size": "1"}, {"setting seed": "0", "setting size": "2"}
    text = "rank 1 (host b) differs from rank 0 (host a) in setting size: 2 instead of 1"
    assert difference([facts, other], NAMES) == text
    assert str(difference([{}, {"jax": "1"}], NAMES)).endswith("in jax: 1 instead of none")
    found = list[dict[str, str]]()
    for flags in ("", "--xla_cpu_enable_fast_math=false"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        found.append(early_facts(EngineConfig(model="demo")))
    for facts, said in ((found, f"{flags} instead of none"), (found[::-1], f"none instead of {flags}")):
        assert str(difference(facts, NAMES)).endswith(f"in variable XLA_FLAGS: {said}")


def test_every_fact_counts() -> None:
    """Versions, the model's files, layout, kernels, CPU features: each is named with both values."""
    facts = {**early_facts(EngineConfig(model="demo")), **plan_facts(plan_of_demo())}
    named = {"jax", "jaxserve", "model file config.json", "layout", "attention kernel", "CPU", "setting seed", "mesh"}
    assert named <= facts.keys()
    for name, value in facts.items():
        problem = difference([facts, {**facts, name: "other"}], NAMES)
        if name not in ("num_pages", "max_model_len"):
            assert problem == f"{NAMES[1]} differs from {NAMES[0]} in {name}: other instead of {value}"


def test_files_may_be_elsewhere_but_not_others(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIRECTORY, copy)
    facts = [early_facts(EngineConfig(model=model)) for model in ("demo", str(copy))]
    assert difference(facts, NAMES) is None
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    changed = early_facts(EngineConfig(model=str(copy)))
    assert str(difference([facts[0], changed], NAMES)).startswith(
        "rank 1 (host b) differs from rank 0 (host a) in model file config.json: "
    )


def test_pages_are_the_least_and_all_else_is_equal() -> None:
    plan = plan_of_demo()
    fewer = dataclasses.replace(plan, models=[dataclasses.replace(each, num_pages=1) for each in plan.models])
    facts = [plan_facts(plan), plan_facts(fewer)]
    assert difference(facts, NAMES) is None
    assert least(facts) == {"num_pages": 1, "max_model_len": plan.max_model_len}
    other = plan_facts(dataclasses.replace(plan, max_num_seqs=9))
    assert "in max_num_seqs: 9 instead of" in str(difference([facts[0], other], NAMES))
