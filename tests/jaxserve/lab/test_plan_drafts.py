"""Speculative decoding in plans: the drafter's bytes, the work of its passes, and when drafts pay."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.api.config import EngineConfig
from jaxserve.cli import main
from jaxserve.device.build import plan_engine
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.plan import costs
from jaxserve.lab.plan.communication import drafter_collectives
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.plan.work import StageWork
from jaxserve.lab.records import DraftCost
from pallas_kernels.registry import load
from tests import block_heads
from tests.block_heads import write_dflash
from tests.draft_heads import HEAD, as_speculators, write_eagle3
from tests.random_checkpoint import DEEPSEEK, LLAMA
from tests.tiny_programs import make_program, tiny_config

TARGET = {**LLAMA, "num_hidden_layers": 8}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_seqs": 4}


@pytest.fixture(autouse=True, scope="module")
def few_batch_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "BATCH_SIZES", (1,))
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without weights, and an EAGLE-3 head for it."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(TARGET))
    named = {"verifier": {"name_or_path": str(folder)}, "proposal_methods": [{"speculative_tokens": 2}]}
    write_eagle3(folder / "head", as_speculators(HEAD, speculators_config=named))
    return folder


@pytest.fixture(scope="module")
def eagle3(directory: Path) -> Plan:
    """The plan of the head alone, whose config.json names the target."""
    return jaxserve.plan(str(directory / "head"), "tensor=2", draft_batches=[2], **SETTINGS)


def test_bytes_of_a_head(eagle3: Plan) -> None:
    """Each of two devices has half of the layer, and all of the projection; the output head's 20 tokens divide by 2."""
    found = eagle3.drafting
    assert found is not None and found.drafter is not None
    heads, features = 2 + 2 * 1, 24 // 2
    layer = heads * 8 * 32 + 2 * 8 * 16 + 3 * features * 16
    assert found.drafter.weights == 4 * (layer + 48 * 16 + 10 * 16 + 4 * 16)
    assert found.drafter.kv_bytes_per_token == 4 * 2 * 8
    assert found.drafter.page_state_bytes == 4 * 16
    assert found.drafter.slot_bytes == 4 * 4 * (16 + 2), "states and drafts of 4 sequences"
    assert eagle3.fullest.weights > found.drafter.weights


def test_collectives_of_a_pass(eagle3: Plan) -> None:
    """Those of the embedding, of attention and MLP, and of the output head."""
    (last,) = eagle3.models
    shape = BatchShape(num_tokens=6, num_rows=2, table_pages=4, decode_only=False)
    counts: collections.Counter[str] = collections.Counter()
    for part in drafter_collectives(last, shape):
        for each in part.found:
            counts[each.kind] += each.times
    assert counts == {"all-reduce": 3, "all-gather": 1}


def test_a_head_that_drafts_blocks_is_planned(tmp_path: Path) -> None:
    """On two devices each of its layers sums twice, and each device gathers the logits."""
    target, head = tmp_path / "target", tmp_path / "head"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 8, "vocab_size": 360}))
    write_dflash(head, block_heads.HEAD)
    drafts = {"method": "dflash", "model": str(head), "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2, "speculative_config": drafts}
    (last,) = plan_engine(EngineConfig(model=str(target), **settings)).models
    (found,) = drafter_collectives(last, BatchShape(num_tokens=8, num_rows=8, table_pages=4, decode_only=True))
    counts: collections.Counter[str] = collections.Counter()
    for each in found.found:
        counts[each.kind] += each.times
    assert counts == {"all-reduce": 4 + 1, "all-gather": 1}
    assert last.abstract_states() is None


def test_an_mtp_layer_reads_the_output_head_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | {"num_nextn_predict_layers": 1}))
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    (model,) = plan_engine(EngineConfig(model=str(tmp_path), dtype="float32", speculative_config=drafts)).models
    assert model.drafter is not None
    own, more = StageWork(model.drafter.sharded), StageWork.of_drafter(model)
    assert more.decode(1, 8, 1).flops - own.decode(1, 8, 1).flops == 2 * 51 * 16


def test_work_of_drafts() -> None:
    """Native kernels read the keys of a row once for all its drafts, others once for each."""
    for name, readers in (("native", 1), ("xla", 3)):
        work = StageWork(dataclasses.replace(make_program(tiny_config()), kernel=load("paged_attention", name)))
        plain, drafts, last = work.decode(2, 10, 2), work.decode(2, 10, 2, 3), work.decode(2, 10, 2, 3, 1)
        assert drafts.flops == 3 * plain.flops
        assert drafts.kv_bytes == last.kv_bytes == readers * plain.kv_bytes
        assert drafts.weight_bytes == plain.weight_bytes
        assert drafts.flops - last.flops == 2 * 2 * 2 * 53 * 16, "the head reads two tokens fewer of each row"


COSTS = [(1, 1.75, 0.75), (2, 1.75, 0.5), (4, 1.0, 0.0), (4, 5.0, 1.0), (2, 0.9, 0.0), (2, 3.01, None), (0, 1.2, None)]


@pytest.mark.parametrize(("num_drafts", "ratio", "acceptance"), COSTS)
def test_the_acceptance_from_which_drafts_pay(num_drafts: int, ratio: float, acceptance: float | None) -> None:
    cost = DraftCost(batch=1, num_drafts=num_drafts, plain_s=2.0, step_s=2 * ratio, drafting_s=0.0)
    assert cost.ratio == pytest.approx(ratio)
    assert cost.acceptance == (None if acceptance is None else pytest.approx(acceptance, abs=1e-6))


def test_report_of_a_drafter(eagle3: Plan, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(eagle3)
    assert "Drafter on each device of the last stage: eagle3 head, float32; part of the above" in text
    assert "Decode steps without and with drafts (eagle3, 2 drafts per sequence; modelled, unmeasured)" in text
    assert re.search(r"\n  2 +2 .* µs +\d+\.\d\d +(never|\d+% accepted)\n", text)
    measured = dataclasses.replace(eagle3, device=dataclasses.replace(eagle3.device, source="measured"))
    assert "(eagle3, 2 drafts per sequence; modelled from measured rates)" in str(measured)
    values = eagle3.as_dict()["drafting"]
    assert [cost["batch"] for cost in values["costs"]] == [2]
    assert values["drafter"]["name"] == "eagle3 head"
    spec = ["--spec-method", "ngram", "--spec-tokens", "4"]
    main(["plan", str(directory), "--max-model-len", "64", *spec, "--draft-batches", "2", "--json"])
    printed = json.loads(capsys.readouterr().out)["drafting"]
    assert printed["drafter"] is None
    (cost,) = printed["costs"]
    assert (cost["batch"], cost["num_drafts"], cost["drafting_s"]) == (2, 4, 0)
    assert 1 < cost["ratio"] < 5


def test_drafts_of_one_pass_cost_less(tmp_path: Path) -> None:
    """The draft model is read once, not in each of four passes."""
    (tmp_path / "config.json").write_text(json.dumps(TARGET | {"pard_token": 5}))
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    found = [
        jaxserve.plan(
            str(tmp_path), speculative_config={**drafts, "parallel_drafting": each}, draft_batches=[1], **SETTINGS
        ).drafting
        for each in (False, True)
    ]
    in_turn, at_once = (each.costs[0] for each in found if each is not None)
    assert (in_turn.num_drafts, at_once.num_drafts) == (4, 4)
    assert 0 < at_once.drafting_s < in_turn.drafting_s


def test_steps_with_many_rows_verify_fewer_drafts(directory: Path) -> None:
    """The 16 samples that a step may have are divided over 6 rows."""
    drafts = {"method": "suffix", "num_speculative_tokens": 8}
    settings: dict[str, Any] = SETTINGS | {"num_seqs": 6, "max_num_batched_tokens": 16}
    planned = jaxserve.plan(str(directory), speculative_config=drafts, draft_batches=[6], **settings)
    assert planned.drafting is not None
    assert [cost.num_drafts for cost in planned.drafting.costs] == [1]


def test_bad_batch_sizes() -> None:
    with pytest.raises(ValueError, match="draft_batches: expected an integer >= 1, got 0"):
        jaxserve.plan("demo", draft_batches=[0])
