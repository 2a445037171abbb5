"""Plans of real and small models, against figures computed by hand, whole programs, and what engines plan."""

import collections
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, UnsupportedModelError
from jaxserve.cli import main
from jaxserve.device.build import plan_engine
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_hidden, trace_step
from jaxserve.lab.compiled import target_config
from jaxserve.lab.hardware import DEVICES, LINKS, get_device
from jaxserve.lab.links import collective_seconds, one_shot_seconds, ring_seconds
from jaxserve.lab.plan.communication import HAND_OVER, LAYERS, StepCollectives
from jaxserve.lab.plan.memory import temporary_bytes
from jaxserve.lab.plan.placement import Placement
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.plan.work import StageWork
from jaxserve.lab.records import Communication
from jaxserve.models.registry import config_from_hf
from jaxserve.models.stages import stages_of
from scripts.gpu.models import CONFIGS, LLAMA_70B
from scripts.gpu.steps import step_program
from sharding import MeshShape, make_mesh
from sharding.plan import Collective, collectives
from tests.random_checkpoint import SHARING
from tests.tiny_programs import gpt2_config, gpt_oss_config, latent_config, make_program, sparse_config, tiny_config

KIB, MIB = 1 << 10, 1 << 20
CARD = dataclasses.replace(DEVICES["rtx3090"], memory_bytes=24 * 10**9)


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> Plan:
    model = str(shared_data / "configs" / "qwen2.5-14b-cogito")
    return jaxserve.plan(model, "tensor=2", device=CARD, gpu_memory_utilization=0.9, max_model_len=4096)


def in_layers(found: tuple[Communication, ...]) -> Communication:
    (layers,) = (each for each in found if each.part == LAYERS)
    return layers


def test_figures_computed_by_hand(qwen: Plan) -> None:
    """Qwen2.5-14B on two devices: 48 layers, hidden size 5120, 8 key/value heads of 128 features, in bfloat16."""
    decode, prefill = in_layers(qwen.decode_of(1).communication), in_layers(qwen.prefill.communication)
    assert [decode.kind, decode.axes, decode.times, decode.num_devices] == ["all-reduce", ("tensor",), 96, 2]
    assert [decode.num_bytes, decode.total_bytes] == [10 * KIB, 960 * KIB]
    assert qwen.prefill.rows == 2048
    assert [prefill.times, prefill.num_bytes, prefill.total_bytes] == [96, 20 * MIB, 1920 * MIB]
    assert {(each.part, each.kind) for each in qwen.prefill.communication} == {
        ("embedding", "all-reduce"),
        ("layers", "all-reduce"),
        ("head and sampling", "all-gather"),
    }
    assert [qwen.model_kv_bytes_per_token, qwen.kv_bytes_per_token] == [192 * KIB, 96 * KIB]
    assert qwen.fullest.weights / 1e9 == pytest.approx(14.77, abs=0.005)
    tokens = (qwen.fullest.usable - qwen.fullest.weights) / qwen.kv_bytes_per_token
    assert qwen.fullest.usable == 0.9 * 24e9
    assert 66_000 < tokens < 71_000


def test_two_devices_hold_far_more_than_twice_the_tokens_of_one(shared_data: Path) -> None:
    """If a model barely fits on one device, a second one has its memory for pages."""
    model = str(shared_data / "configs" / "qwen2.5-14b-cogito")
    card = dataclasses.replace(CARD, memory_bytes=36 * 10**9)
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.95, "max_num_batched_tokens": 512, "num_seqs": 64}
    one, two = (jaxserve.plan(model, {"tensor": size}, device=card, max_model_len=2048, **settings) for size in (1, 2))
    assert one.fits and two.fits
    assert two.kv_tokens > 10 * one.kv_tokens > 0
    assert two.num_requests == two.kv_tokens // 2048


SHAPES = {
    "decode": BatchShape(num_tokens=16, num_rows=16, table_pages=4, decode_only=True),
    "prefill": BatchShape(num_tokens=32, num_rows=4, table_pages=4, decode_only=False),
}
SPARSE = sparse_config(num_heads=8, hidden_size=32)
WHOLE = [
    *[(tiny_config(num_heads=8, hidden_size=32), layout, 4, 1) for layout in ("tensor_parallel", "split_logits")],
    (tiny_config(num_heads=8, hidden_size=32), "sequence_parallel", 2, 1),
    (gpt2_config(), "sequence_parallel", 4, 1),
    (tiny_config(num_heads=8, hidden_size=32), "context_parallel", 4, 1),
    (latent_config(num_heads=8, num_kv_heads=8, hidden_size=32), "context_parallel", 2, 1),
    (SPARSE, "expert_parallel", 4, 1),
    *[(SPARSE, layout, 2, 4) for layout in ("expert_gather", "expert_all_reduce", "expert_all_to_all")],
    (latent_config(num_heads=8, num_kv_heads=8, hidden_size=32), "expert_gather", 2, 2),
    (gpt_oss_config(num_heads=8, hidden_size=32), "replicated_attention", 2, 1),
]


def counted(found: list[Collective]) -> collections.Counter[Any]:
    counts: collections.Counter[Any] = collections.Counter()
    for each in found:
        counts[each._replace(times=1)] += each.times
    return counts


def combined(program: ShardedModel, shape: BatchShape, layers: range | None = None) -> collections.Counter[Any]:
    parts = StepCollectives(program).count(shape, program.layers if layers is None else layers)
    return counted([each for part in parts for each in part.found])


@pytest.mark.parametrize("step", SHAPES)
@pytest.mark.parametrize(("config", "layout", "tensor", "expert"), WHOLE)
def test_parts_have_the_collectives_of_the_whole_program(
    config: Any, layout: str, tensor: int, expert: int, step: str
) -> None:
    program = make_program(config, tensor=tensor, expert=expert, layout=layout, num_slots=16)
    traced = trace_step(program, SHAPES[step], "greedy")
    expected = counted(list(collectives(traced.jaxpr.jaxpr, is_likely=True)))
    assert combined(program, SHAPES[step]) == expected
    assert expected


@pytest.mark.parametrize("layout", ["tensor_parallel", "sequence_parallel"])
def test_parts_of_a_stage_have_the_collectives_of_its_program(layout: str) -> None:
    program = make_program(tiny_config(num_heads=8, hidden_size=32), tensor=2, layout=layout)
    first, last = (dataclasses.replace(program, stage=stage) for stage in stages_of([1, 1]))
    shape = SHAPES["prefill"]
    for stage, traced in ((first, trace_hidden(first, shape)), (last, trace_step(last, shape, "greedy"))):
        expected = counted(list(collectives(traced.jaxpr.jaxpr)))
        assert stage.stage is not None
        assert combined(program, shape, stage.stage.layers) == expected


def test_equal_layers_are_traced_once() -> None:
    program = make_program(sparse_config(num_layers=4, sparse_layers=(False, True, True, False), **FOUR), tensor=2)
    assert StepCollectives(program).kinds == (0, 1, 1, 0)


FOUR = {"rope_layers": (True,) * 4, "sliding_windows": (None,) * 4}
README = Path(__file__).parents[3] / "pallas_kernels" / "README.md"
COMPILED_MODELS = {
    "Llama-3.1-8B": CONFIGS["llama-8b"],
    "Qwen2.5-14B": CONFIGS["qwen-14b"],
    "Llama-3.1-70B": LLAMA_70B,
}
COMPILED = r"^\| (?P<model>[\w.-]+), (?P<devices>\d) \|.*\| (?P<one>\d+) / (?P<many>\d+) / (?P<prefill>\d+) \|$"


ROWS = [*re.finditer(COMPILED, README.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} on {row['devices']}")
def test_the_model_of_temporaries_agrees_with_the_compiler(row: re.Match[str]) -> None:
    """Decode steps of 1 and of 64 tokens and a prefill step of 2,048, compiled for an H200."""
    raw = COMPILED_MODELS[row["model"]]
    devices = int(row["devices"])
    mesh = make_mesh(MeshShape(tensor=devices), DEVICES["h200"].planned(devices, devices))
    config = config_from_hf(raw, row["model"])
    for name, num_tokens, decode_only in (("one", 1, True), ("many", 64, True), ("prefill", 2048, False)):
        program, shape = step_program(config, mesh, None, num_tokens, decode_only)
        variant = "greedy" if decode_only else "any"
        found = temporary_bytes(program, shape.num_tokens, shape.num_rows, variant) / MIB
        assert found == pytest.approx(int(row[name]), rel=0.05, abs=1.6)


def test_the_table_of_temporaries_is_read() -> None:
    assert len(ROWS) == 5


@pytest.mark.parametrize("drafts", [None, {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}])
def test_a_plan_has_the_numbers_of_an_engine(drafts: dict[str, Any] | None) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "speculative_config": drafts}
    engine = plan_engine(EngineConfig(model="demo", tensor_parallel_size=2, **settings))
    planned = jaxserve.plan("demo", "tensor=2", device="cpu", **settings)
    (stage,) = planned.stages
    assert (stage.weights, stage.page_bytes, stage.slots) == (
        engine.needs.weights,
        engine.needs.page,
        engine.needs.slots,
    )
    assert stage.step_reserve == engine.needs.temporaries
    if planned.drafting is None:
        assert drafts is None
    else:
        assert planned.drafting.drafter is not None
        assert planned.drafting.drafter.weights == engine.needs.drafter
        assert all(cost.ratio > 2 for cost in planned.drafting.costs), "the model drafts for itself, in 3 passes"
    assert planned.pages_per_request == engine.needs.request_pages
    assert planned.num_pages >= engine.models[0].num_pages


def test_stages_lanes_and_replicas_share_a_batch(tmp_path: Path, shared_data: Path) -> None:
    """Two replicas of two stages: 16 sequences are two microbatches of 4 in each."""
    model = str(shared_data / "configs" / "qwen3-1.7b")
    planned = jaxserve.plan(model, "data=2,stage=2", device="h100", hosts=2, max_model_len=2048, context=512)
    step = planned.decode_of(16)
    assert (step.rows, step.microbatches, step.context) == (4, 2, 512)
    assert step.step_s == pytest.approx(2 * max(step.stage_s))
    assert step.tokens_per_s == pytest.approx(16 / step.step_s)
    there, back = (each for each in step.communication if each.kind == HAND_OVER)
    assert (there.num_bytes, there.times, there.num_devices) == (4 * 2048 * 2, 1, 2)
    assert (back.num_bytes, back.times) == (4 * 8, 1)
    assert there.link == "nvlink-h100"
    assert planned.links["data"].name == "infiniband-ndr"
    assert planned.decode_of(1).step_s == pytest.approx(sum(planned.decode_of(1).stage_s))
    weights = sum(stage.weights for stage in planned.stages)
    assert [stage.layers for stage in planned.stages][1].stop == 28
    assert step.weight_bytes < weights


def test_layers_that_read_the_pages_of_others(tmp_path: Path) -> None:
    """They have none; of the embeddings for each layer, a step reads rows alone."""
    (tmp_path / "config.json").write_text(json.dumps(SHARING))
    planned = jaxserve.plan(str(tmp_path), "tensor=2", dtype="float32")
    assert planned.model_kv_bytes_per_token == 4 * 2 * 2 * (8 + 16)
    without = planned.fullest.weights - planned.decode_of(1).weight_bytes
    assert without == 4 * 26 * 4 * 6, "half of 52 rows for four layers"
    assert LAYERS in {each.part for each in planned.decode_of(1).communication}


def test_work_of_a_dense_step() -> None:
    """Each of two devices has 2 query heads, 1 key/value head, 12 features and 27 tokens of the vocabulary."""
    program = make_program(tiny_config(), tensor=2)
    found = StageWork(program).decode(4, 10, 4)
    heads, features = 4 // 2, 24 // 2
    layers = 2 * 16 * (heads * 4 + 2 * 4 + heads * 4 + 3 * features)
    attention = 2 * 2 * heads * (4 + 4) * 10
    assert found.flops == 4 * (2 * (layers + 27 * 16) + attention)
    assert found.kv_bytes == 4 * 10 * 2 * 2 * 4 * 4
    assert found.weight_bytes == program.weight_bytes - 27 * 16 * 4


def test_devices_that_share_tokens_read_their_part_of_them() -> None:
    heads, tokens = (StageWork(make_program(tiny_config(), tensor=2, layout=name)) for name in LAYOUTS_OF_PAGES)
    assert tokens.decode(1, 64, 1).kv_bytes == heads.decode(1, 64, 1).kv_bytes
    more = [work.decode(1, 64, 1).flops - work.decode(1, 32, 1).flops for work in (heads, tokens)]
    assert more[0] == more[1]


LAYOUTS_OF_PAGES = ("tensor_parallel", "context_parallel")


def test_few_tokens_read_few_experts() -> None:
    """A token has 3 of 8 experts; the expectation for many tokens is all."""
    work = StageWork(make_program(SPARSE))
    one, two, many = (work.decode(rows, 1, rows).weight_bytes for rows in (1, 2, 1000))
    experts = 8 * 3 * 16 * 32 * 4
    assert many - one == pytest.approx(experts * 5 / 8)
    assert many - two == pytest.approx(experts * (5 / 8) ** 2)


def test_time_of_collectives() -> None:
    link = dataclasses.replace(LINKS["nvlink-h100"], bytes_per_s=100e9, share=1.0, latency_s=1e-6)
    assert ring_seconds("all-reduce", 4 * 10**9, 4, link) == pytest.approx(2 * 3 / 4 * 4e9 / 100e9 + 6e-6)
    assert one_shot_seconds("all-reduce", 4 * 10**9, 4, link) == pytest.approx(3 * 4e9 / 100e9 + 1e-6)
    assert ring_seconds("all-gather", 4 * 10**9, 4, link) == pytest.approx(3 / 4 * 4e9 / 100e9 + 3e-6)
    assert ring_seconds("reduce-scatter", 1 * 10**9, 4, link) == ring_seconds("all-gather", 4 * 10**9, 4, link)
    assert collective_seconds("all-reduce", 1 * 10**3, 8, link) == one_shot_seconds("all-reduce", 1 * 10**3, 8, link)
    assert collective_seconds("all-reduce", 1 * 10**9, 8, link) == ring_seconds("all-reduce", 1 * 10**9, 8, link)
    assert collective_seconds(HAND_OVER, 1 * 10**9, 2, link) == pytest.approx(1e-2 + 1e-6)
    assert collective_seconds("all-reduce", 1 * 10**9, 1, link) == 0


@pytest.mark.parametrize(
    ("hosts", "crossing"),
    [(1, set()), (2, {"data"}), (4, {"data", "stage"}), (8, {"data", "stage", "expert"}), (16, {*"dset"})],
)
def test_axes_that_cross_hosts(hosts: int, crossing: set[str]) -> None:
    """Consecutive devices are neighbours along tensor, then expert, stage and data."""
    placed = Placement(MeshShape(data=2, stage=2, tensor=2, expert=2), DEVICES["h100"], hosts)
    found = {axis for axis, link in placed.links.items() if link.name == "infiniband-ndr"}
    assert found == ({"data", "stage", "expert", "tensor"} if hosts == 16 else crossing)
    assert placed.crosses_hosts(["tensor", "expert"]) == (hosts >= 8)


def test_hosts_have_at_most_eight_gpus() -> None:
    assert [DEVICES["h100"].fewest_hosts(count) for count in (1, 8, 12, 512)] == [1, 1, 2, 64]
    assert DEVICES["cpu"].fewest_hosts(64) == 1


def test_a_model_that_does_not_fit_is_planned(shared_data: Path) -> None:
    planned = jaxserve.plan(
        str(shared_data / "configs" / "yi-1.5-6b"), device=dataclasses.replace(CARD, memory_bytes=10**10)
    )
    assert not planned.fits
    assert planned.num_requests == planned.num_pages == 0
    assert "Does not fit: the model does not fit: each device needs 11.29 GiB for weights" in str(planned)


def test_report(qwen: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(qwen)
    assert re.search(r"weights +13\.75 GiB +counted", text)
    assert re.search(r"layers +all-reduce +tensor +2 +96 +10 KiB +960 KiB +pcie4", text)
    assert re.search(r"temporaries of the largest step .* modelled", text)
    measured = dataclasses.replace(qwen, device=dataclasses.replace(qwen.device, source="measured"))
    assert "Time (modelled from measured rates; decode at" in str(measured)
    values = json.loads(json.dumps(qwen.as_dict()))
    assert values["stages"][0]["temporaries_source"] == "modelled"
    assert values["decode"][0]["communication"][1]["times"] == 96
    assert values["decode"][0]["tokens_per_s"] == qwen.decode_of(1).tokens_per_s
    assert qwen._repr_html_().count("<table>") == 4
    main(["plan", "demo", "--mesh", "tensor=2", "--device", "a100-80g", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["device"]["name"] == "a100-80g"
    assert printed["mesh"]["tensor"] == 2
    with pytest.raises(ConfigError, match="batch=3 is not planned; planned: 1, 2, 4"):
        qwen.decode_of(3)


REFUSED = [
    ({"device": "h10"}, r"unknown device 'h10' \(did you mean 'h100'\?\); known: h200, h100, a100-80g, "),
    ({"link": "nvlink"}, "unknown link 'nvlink'.*; known: pcie3, pcie4, "),
    ({"mesh": "tensor=3"}, "tensor_parallel_size=3 does not divide .* of LlamaForCausalLM; valid sizes: 1, 2, 4"),
    ({"mesh": "stage=9"}, "pipeline_parallel_size=9 exceeds the 4 layers of LlamaForCausalLM; use 1 to 4"),
    ({"mesh": "rows=2"}, "mesh: expected a size >= 1 for any of data, stage, tensor, expert"),
    ({"mesh": "tensor=2", "hosts": 3}, "hosts=3 does not divide the 2 devices of the mesh; valid: 1, 2"),
    ({"layout": "wide"}, "unknown layout 'wide'; supported layouts: .*expert_all_reduce, "),
    ({"device": "cpu", "compiles": True}, "device cpu cannot be compiled for; known: h200, h100, a100-80g, "),
    ({"context": 0}, "context: expected an integer >= 1, got 0"),
    ({"dtype": "float8"}, "dtype: expected one of auto, float32, "),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxserve.plan("demo", **settings)


def test_a_dtype_that_a_device_has_no_rate_for() -> None:
    with pytest.raises(ConfigError, match="device h100 has no rate for int8; known: bfloat16, float16, float32"):
        get_device("h100").flops_of("int8", 1)


def test_unsupported_models_are_refused(shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="GPTNeoXForSequenceClassification is not supported; supported: "):
        jaxserve.plan(str(shared_data / "configs" / "pythia-410m"))


def test_a_quantized_model_is_planned_as_a_plain_one(shared_data: Path) -> None:
    directory = str(shared_data / "configs" / "llama-2-13b-bnb-nf4")
    settings: dict[str, Any] = {"device": "h100", "max_model_len": 2048, "dtype": "bfloat16"}
    plain = jaxserve.plan(directory, hf_overrides={"quantization_config": None}, **settings)
    assert jaxserve.plan(directory, **settings).fullest.weights == plain.fullest.weights


HAS_CUDA = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


@pytest.mark.skipif(HAS_CUDA, reason="JAX's CUDA wheels are installed")
def test_compiling_needs_the_cuda_wheels() -> None:
    message = (
        r"compiling for h200 needs Python >= 3\.12 with jax\[cuda13\] >= 0\.11: .*; without compiling, temporaries are"
    )
    with pytest.raises(ConfigError, match=message):
        jaxserve.plan("demo", device="h200", compiles=True)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA or sys.version_info < (3, 12), reason="needs JAX's CUDA wheels")
def test_temporaries_as_compiled() -> None:
    planned = jaxserve.plan("demo", "tensor=2", device="h200", num_seqs=64, max_num_batched_tokens=512, compiles=True)
    (stage,) = planned.stages
    assert stage.temporaries_source == "compiled"
    assert 0 < stage.temporaries <= stage.step_reserve
    assert stage.compiled_collectives == {"all-reduce": 9, "all-gather": 1}
    assert "Collectives of the largest step (compiled)" in str(planned)


def test_target_of_the_compiler() -> None:
    lines = target_config(DEVICES["a100-80g"]).splitlines()
    assert '  name: "NVIDIA A100-SXM4-80GB"' in lines
    assert "  cuda_compute_capability { major: 8 }" in lines
    assert "  core_count: 108" in lines
    assert '  platform_version: "Compute Capability 8.0"' in lines
    assert '  platform_version: "Compute Capability 9.0a"' in target_config(DEVICES["h100"]).splitlines()


LARGEST = """
import json, resource, sys, time
import jaxserve
start = time.monotonic()
plan = jaxserve.plan(**json.loads(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([time.monotonic() - start, used / 2**20, plan.num_devices, plan.fits, plan.num_requests]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-r1"])
def test_large_models_on_512_devices(name: str, shared_data: Path, tmp_path: Path) -> None:
    """In one process: at most 5 minutes and 8 GB."""
    settings: dict[str, Any] = {"device": "h100", "hosts": 64, "max_model_len": 8192, "dtype": "bfloat16"}
    if name == "deepseek-r1":
        settings |= {"model": str(shared_data / "configs" / name), "mesh": "tensor=8,expert=64"}
        settings |= {"max_num_batched_tokens": 512}
    else:
        raw = json.loads((shared_data / "configs" / "llama-3.1-70b" / "config.json").read_text())
        raw |= {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        settings |= {"model": str(tmp_path), "mesh": "data=4,stage=16,tensor=8"}
    command = [sys.executable, "-c", LARGEST, json.dumps(settings)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    seconds, gibibytes, devices, fits, requests = json.loads(output)
    assert gibibytes < 8
    assert (devices, fits) == (512, True), seconds
    assert requests > 0
    assert seconds < 300
