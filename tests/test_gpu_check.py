"""The GPU's check without a GPU: its files, its clock, its processes, its timing, its checkpoints, and its dry run."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.engine.build import load_params, plan_engine
from jaxserve.models.loading import check_weights
from scripts.gpu import engine, kernels, models, numerics, peers, workload
from scripts.gpu.driver import MARK, Driver, serve
from scripts.gpu.figures import Deadline, Figure, Results, line, write_whole
from scripts.gpu.parts import Context, Item, SkippedError, environment
from scripts.gpu.timing import FLUSH_BYTES, MAX_SETS, Rotation, choose_sets, matching_leaves, tree_bytes
from scripts.gpu_check import NO_GPU, PARTS, load_part, main, parse, with_ceilings

REPOSITORY = Path(__file__).resolve().parent.parent
ABOUT = {"device": "a card", "versions": {"jax": "1", "torch": "not installed"}}
TINY = Context(is_tiny=True, copy_bytes_s=1e9, flops_s=1e9)


def figure(name: str = "speed", **changes) -> Figure:
    return Figure(**{"part": "kernels", "name": name, "value": 2.0, "unit": "us", **changes})


# ---------------------------------------------------------------- files


def test_every_figure_is_on_disk_at_once(tmp_path):
    results = Results(tmp_path / "new", "run", ABOUT)
    assert json.loads(results.json_path.read_text())["figures"] == []
    results.add(figure(roofline=1.0, share=0.51237, goal="80 %", note="a | b\nc"))
    content = json.loads(results.json_path.read_text())
    assert content["device"] == "a card" and content["figures"][0]["share"] == 0.5124
    table = results.markdown_path.read_text()
    assert "- versions: jax 1, torch not installed" in table
    assert "| speed | 2.0 us | 1 | 51% | 80 % | a / b c |" in table
    assert sorted(path.name for path in results.json_path.parent.iterdir()) == ["run.json", "run.md"]


def test_a_later_figure_takes_the_place_of_the_earlier(tmp_path):
    results = Results(tmp_path, "run", ABOUT)
    results.add(figure(value="fail", note="wrong"))
    results.add(figure("other"))
    assert results.failed == {"kernels: speed": "wrong"}
    results.add(figure(value="pass"))
    assert [(f.name, f.value) for f in results.figures] == [("speed", "pass"), ("other", 2.0)]
    assert not results.failed


def test_a_resumed_run_has_what_was_done(tmp_path):
    first = Results(tmp_path, "run", ABOUT)
    first.add(figure())
    first.finish("kernels/a")
    first.skip("kernels/b", "no time")
    first.fail("kernels/c", "broke")
    again = Results(tmp_path, "run", ABOUT, resumes=True)
    assert again.figures == first.figures and again.done == ["kernels/a"]
    assert again.skipped == {"kernels/b": "no time"} and again.failed == {"kernels/c": "broke"}
    assert "- kernels/b: no time" in again.markdown_path.read_text()
    again.finish("kernels/b")
    again.finish("kernels/c")
    assert not again.skipped and not again.failed
    assert Results(tmp_path, "run", ABOUT).figures == []


def test_a_broken_write_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def broken(source, target):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_lines_say_share_goal_and_note():
    shown = line(Figure.timed("gemms", "x", 2e-6, 1e-6, goal="88 %", note="n"))
    assert shown == "gemms      x: 2.0 us  50% of 1 us  (goal 88 %)  [n]"
    assert line(figure(value=None, unit="")) == "kernels    speed: -"


# ---------------------------------------------------------------- time


class Clock:
    """Seconds that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_deadline():
    clock = Clock()
    deadline = Deadline(60, clock)
    part = deadline.part(0.5)
    clock.now += 20
    assert deadline.left_s() == 40 and part.left_s() == 10
    assert part.fits(10) and not part.fits(10.1)
    clock.now += 50
    assert deadline.left_s() == 0 and not deadline.fits(0.1)
    assert Deadline(None, clock).part(0.1).fits(1e9)


class FakePart:
    """Items that a process of the test's own serves."""

    IS_ALONE: bool = False
    ENVIRONMENT: dict[str, str] = {"FROM_PART": "yes"}

    def __init__(self, *items: Item):
        self._items = items

    def items(self, context):
        return list(self._items)

    def run(self, item, context):
        if item == "absent":
            raise SkippedError("not here")
        yield figure(item, value=context.seed)
        if item == "broken":
            raise ValueError("first line\nsecond")
        if item == "lost":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def programs(self, context):
        yield from ()


CHILD = textwrap.dedent("""
    import json, os, sys, time
    job = json.load(sys.stdin)
    def tell(kind, content):
        print("@gpu_check " + kind + " " + json.dumps(content), flush=True)
    print("noise", os.environ["FROM_PART"])
    for name, *_ in job["items"]:
        tell("begin", name)
        figure = {"part": sys.argv[1], "name": name, "value": 1.0}
        if name == "hangs":
            tell("figure", figure)
            time.sleep(60)
        if name == "dies":
            os._exit(9)
        tell("figure", figure)
        tell("done", {"item": name})
""")


def driven(
    tmp_path: Path, part: FakePart, limit_s: float | None = None, child: str = CHILD
) -> tuple[Results, list[str]]:
    results, shown = Results(tmp_path, "run", ABOUT), []
    Driver(results, (sys.executable, "-c", child), shown.append).run_part("kernels", part, TINY, Deadline(limit_s))
    return results, shown


def test_an_item_that_dies_or_hangs_costs_no_other_its_turn(tmp_path):
    items = [Item("a", 0), Item("dies", 0), Item("b", 0), Item("hangs", 0, 0.5), Item("c", 0)]
    results, shown = driven(tmp_path, FakePart(*items))
    assert results.done == ["kernels/a", "kernels/b", "kernels/c"]
    assert results.failed == {
        "kernels/dies": "the process ended with code 9",
        "kernels/hangs": "did not end in time",
    }
    assert [f.name for f in results.figures] == ["a", "b", "hangs", "c"]
    assert "noise yes" in shown and "FAILED kernels/hangs: did not end in time" in shown


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path):
    results, _ = driven(tmp_path, FakePart(Item("long", 1000), Item("hangs", 0), Item("b", 0)), limit_s=6.5)
    assert set(results.skipped) == {"kernels/long", "kernels/hangs", "kernels/b"}
    assert "needs about 1000 s" in results.skipped["kernels/long"]
    assert results.skipped["kernels/hangs"] == "the time was up"
    assert [f.name for f in results.figures] == ["hangs"]


def test_a_process_that_does_not_start_fails_all_its_items(tmp_path):
    results, _ = driven(tmp_path, FakePart(Item("a", 0), Item("b", 0)), child="import sys; sys.exit(4)")
    assert results.failed == dict.fromkeys(("kernels/a", "kernels/b"), "the process ended with code 4")


def test_done_items_are_not_repeated(tmp_path):
    results = Results(tmp_path, "run", ABOUT)
    results.finish("kernels/a")
    Driver(results, ("false",), print).run_part("kernels", FakePart(Item("a")), TINY, Deadline(None))
    assert results.done == ["kernels/a"] and not results.failed


def served(*items: Item, ends: float | None = None) -> tuple[int, list[tuple[str, dict]]]:
    said: list[str] = []
    job = {"items": items, "context": dataclasses.asdict(dataclasses.replace(TINY, seed=5, ends=ends))}
    code = serve(FakePart(*items), io.StringIO(json.dumps(job)), said.append)
    parted = [text.removeprefix(MARK).partition(" ") for text in said]
    return code, [(kind, json.loads(rest)) for kind, _, rest in parted]


def test_a_process_tells_what_became_of_its_items(capsys):
    code, told = served(Item("absent"), Item("broken"), Item("fine"), Item("lost"), Item("never"))
    assert code == 3
    assert [kind for kind, _ in told if kind not in ("begin", "figure")] == ["skipped", "failed", "done", "failed"]
    assert ("skipped", {"item": "absent", "reason": "not here"}) in told
    assert ("failed", {"item": "broken", "reason": "ValueError: first line"}) in told
    assert {content["value"] for kind, content in told if kind == "figure"} == {5}
    assert "second" in capsys.readouterr().err


def test_a_process_begins_nothing_that_would_not_end():
    code, told = served(Item("fine", 30.0), ends=0.0)
    assert code == 0 and [kind for kind, _ in told] == ["skipped"]


def test_a_gpu_that_is_not_there_is_no_cpu():
    """JAX would go on with the CPU, and its figures be taken for the GPU's, unless the platform is named."""
    base = {"JAX_PLATFORMS": "", "HOME": "/x"}
    assert environment(base, kernels, Context())["JAX_PLATFORMS"] == "cuda,cpu"
    assert environment(base, kernels, TINY)["JAX_PLATFORMS"] == "cpu"
    assert environment(base, peers, Context())["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment(base, engine, Context())


# ---------------------------------------------------------------- timing


def test_sets_outgrow_the_cache_and_fit_into_memory():
    assert choose_sets(1 << 30, 1 << 30) == 3
    assert choose_sets(1, 1) == MAX_SETS
    sets = choose_sets(16 << 20, 16 << 20)
    assert sets is not None and (sets - 1) * (16 << 20) >= FLUSH_BYTES
    assert choose_sets(1 << 20, 30 << 30, memory_bytes=100 << 30) == 3
    assert choose_sets(1 << 20, 40 << 30, memory_bytes=100 << 30) is None


def test_a_rotation_calls_once_on_each_set():
    struct = {"x": jax.ShapeDtypeStruct((3,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    rotation = Rotation(scaled, struct, 4)
    compiled = rotation.compile()
    kept = [[jnp.full(3, float(i)), jnp.float32(2)] for i in range(4)]
    _, rest = compiled([[]] * 4, kept)
    np.testing.assert_array_equal(np.stack([arrays[0] for arrays in rest])[:, 0], [0, 2, 4, 6])
    timing = rotation.measure(compiled, lambda i: {"x": jnp.full(3, float(i)), "y": jnp.float32(2)}, 3, 1e-4)
    assert timing.seconds > 0 and timing.num_sets == 4


def scaled(tree):
    return tree["x"] * tree["y"]


def test_a_rotation_is_not_merged_into_one_call():
    """Equal shapes and the same function: there must be as many products as sets."""
    struct = tuple(jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(2))
    lowered = jax.jit(Rotation(product, struct, 5).program).lower(*Rotation(product, struct, 5).arguments)
    assert lowered.as_text().count("dot_general") == 5
    assert lowered.compile().cost_analysis()["flops"] >= 5 * 2 * 64**3  # type: ignore[index]


def product(pair):
    return pair[0] @ pair[1]


def written(tree):
    """Gives back two of its three arrays changed, and something new."""
    pool, other, amount = tree
    return amount.sum(), pool.at[0].add(amount[0]), other


def test_a_rotation_carries_what_is_changed_in_place():
    struct = (*(jax.ShapeDtypeStruct((8, 4), jnp.float32) for _ in range(2)), jax.ShapeDtypeStruct((2,), jnp.float32))
    carried = matching_leaves(struct, jax.eval_shape(written, struct))
    assert carried == {0: 1, 1: 2}
    rotation = Rotation(written, struct, 3, carried)
    compiled = rotation.compile()
    given = [[jnp.zeros((8, 4)), jnp.ones((8, 4))] for _ in range(3)]
    kept = [[jnp.full(2, float(i))] for i in range(3)]
    given, rest = compiled(given, kept)
    given, rest = compiled(given, kept)
    assert [float(mine[0][0, 0]) for mine in given] == [0, 2, 4]
    assert [float(arrays[0]) for arrays in rest] == [0, 2, 4]
    assert rotation.measure(compiled, lambda i: (*map(jnp.zeros, ((8, 4), (8, 4))), jnp.ones(2)), 3, 1e-4).seconds > 0


def test_bytes_of_keys_too():
    assert tree_bytes((jax.random.key(0), jnp.zeros((2, 3), jnp.bfloat16))) == 8 + 12


# ---------------------------------------------------------------- numerics and kernels


def test_right_answers_pass_and_wrong_ones_are_told(monkeypatch):
    found = list(numerics.run("paged_attention/xla", dataclasses.replace(TINY, seed=11)))
    assert {f.value for f in found} == {"pass"}
    assert {f.note.split(":")[0] for f in found} == {f"seed {numerics.FIXED_SEED}", "seed 11"}
    op = numerics.operation("paged_attention")
    monkeypatch.setattr(op, "tolerance", lambda case: -1.0)
    assert {f.value for f in numerics.run("paged_attention/xla", TINY)} == {"fail"}


def test_a_case_that_breaks_is_a_failure_of_its_own(monkeypatch):
    op = numerics.operation("paged_attention")
    good = op.run

    def run(implementation, case, prepared):
        if case is op.CASES["one_token"]:
            raise NotImplementedError("not this one")
        return good(implementation, case, prepared)

    monkeypatch.setattr(op, "run", run)
    found = {f.name.split()[1]: f for f in numerics.run("paged_attention/xla", TINY)}
    assert found.pop("one_token").note.endswith("NotImplementedError: not this one")
    assert found and {f.value for f in found.values()} == {"pass"}


def test_kernels_are_stated_as_shares():
    found = list(kernels.run("paged_attention/xla", TINY))
    assert found and all(f.unit == "us" and f.share and f.roofline for f in found), found
    assert "sets of" in found[0].note and "fits into the L2 cache" in found[0].note


def test_benches_that_do_not_fit_are_noted(monkeypatch):
    monkeypatch.setattr(kernels, "choose_sets", lambda touched, held: None)
    with pytest.raises(SkippedError, match="three sets of 0 GB do not fit"):
        list(kernels.run("paged_attention/xla", TINY))


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("model", models.CONFIGS)
def test_checkpoints_can_be_planned_and_loaded(tmp_path, model):
    config = models.config_of(model, is_tiny=True)
    written_bytes = models.write_checkpoint(tmp_path, config, shard_bytes=40_000)
    assert models.has_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert written_bytes == models.sizes_of(config).weight_bytes
    plan = plan_engine(EngineConfig(model=str(tmp_path), attention_backend="xla", **workload.Workload.of(TINY).engine))
    check_weights(plan.directory, plan.config, 1)
    params = load_params(plan, plan.programs[0])
    assert plan.needs.weights == 2 * written_bytes  # float32 on a CPU
    assert all(bool(jnp.isfinite(array).all()) and float(jnp.abs(array).max()) > 0 for array in params)


def test_the_engine_s_steps_are_timed(tmp_path):
    models.write_checkpoint(tmp_path, models.config_of("llama-8b", is_tiny=True))
    settings = {**workload.Workload.of(TINY).engine, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), **settings, attention_backend="xla", compilation_cache_dir="") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 3
        found = workload.decode(llm, 2, 20, 4)
        assert found.num_steps == 4 and found.step_s > 0 and found.device_s is not None
        assert not llm.engine.num_unfinished
        assert workload.prefill_s(llm, 8, runs=1) > 0


def test_sizes_of_the_real_models():
    """The 8B has 8.03 G parameters, of which the embedding's 0.525 G are not read; 128 KiB of KV a token."""
    llama, qwen = (models.sizes_of(models.config_of(name)) for name in ("llama-8b", "qwen-14b"))
    assert llama.weight_bytes == 2 * 8_030_261_248 and llama.kv_bytes == 128 << 10
    assert llama.weight_bytes - llama.read_bytes == 2 * 128256 * 4096
    assert qwen.weight_bytes == 2 * 14_770_033_664 and qwen.kv_bytes == 192 << 10
    assert llama.attention_flops == 4 * 32 * 4096


def test_room_is_made_by_removing_other_checkpoints(tmp_path, monkeypatch):
    for name in ("model-a", "model-b"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(
        models.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=(40 << 30) - (30 << 30) * (tmp_path / "model-a").exists()),
    )
    assert models.make_room(tmp_path, 20 << 30, tmp_path / "model-b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-b"]
    assert not models.make_room(tmp_path, 50 << 30, tmp_path / "model-b")


def test_items_without_a_checkpoint_are_skipped(tmp_path):
    context = dataclasses.replace(TINY, work=str(tmp_path))
    for item in engine.items(context):
        if item.name.endswith("measure"):
            with pytest.raises(SkippedError, match="no checkpoint"):
                list(engine.run(item.name, context))


def test_an_engine_part_has_the_registry_s_order():
    names = [item.name for item in engine.items(Context(is_quick=True))]
    rows = [row for row in kernels.OPERATIONS["paged_attention"] if row in engine.BACKENDS]
    assert names == ["llama-8b write", *(f"llama-8b {row} {what}" for row in rows for what in ("measure", "warm"))]


# ---------------------------------------------------------------- the command


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("scripts.gpu_check.find_gpu", lambda: None)
    assert main(["--only", "ceilings"]) == NO_GPU
    assert "no NVIDIA GPU found" in capsys.readouterr().err


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--only", "kernels,speed"])
    assert "unknown part speed; parts: ceilings, numerics, kernels, gemms, engine, peers" in capsys.readouterr().err


def test_every_part_has_what_a_part_needs():
    for name in PARTS:
        part = load_part(name)
        items = part.items(Context())
        assert items and len({item.name for item in items}) == len(items)
        assert all(item.timeout_s > item.estimate_s > 0 for item in items)
        assert isinstance(part.IS_ALONE, bool)


def test_ceilings_of_the_run_are_handed_on(tmp_path):
    results = Results(tmp_path, "run", ABOUT)
    assert with_ceilings(Context(), results).least_s(1e9) is None
    results.add(figure("copy bandwidth", part="ceilings", value=4000.0, unit="GB/s"))
    results.add(figure("bf16 matrix rate", part="ceilings", value=800.0, unit="TFLOP/s"))
    context = with_ceilings(Context(), results)
    assert context.least_s(4e12) == 1.0 and context.least_s(4e12, 1.6e15) == 2.0


def test_a_run_on_this_machine_s_own_sizes(tmp_path):
    """The whole way, from the command to the files, for the parts that need neither a GPU nor long."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--size", "tiny", "--only", "ceilings"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {"copy bandwidth", "bf16 matrix rate"} <= {each["name"] for each in content["figures"]}
    assert "ceilings/jax" in content["done"] and "seed" in content and "jax" in content["versions"]


def test_a_dry_run_lists_every_part(tmp_path, capsys, monkeypatch):
    for name in ("numerics", "kernels"):
        monkeypatch.setattr(f"scripts.gpu.{name}.rows", lambda platform: [("paged_attention", "xla")])
    monkeypatch.setattr("scripts.gpu.steps.CONFIGS", {})
    monkeypatch.setattr("scripts.gpu.dry_run.steps", lambda context, mesh: iter(()))
    assert main(["--dry-run", "--quick", "--lower-only", "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "dry_run.json").read_text())
    assert [(each["part"], each["value"]) for each in content["figures"]] == [(name, "pass") for name in PARTS]
    shown = capsys.readouterr().out
    assert "lowered" in shown and "llama-8b write" in shown and "transformers 1024" in shown


def test_a_dry_run_tells_what_does_not_lower(tmp_path, capsys, monkeypatch):
    def broken(implementation, case, prepared):
        raise ValueError("no such shape")

    monkeypatch.setattr("scripts.gpu.kernels.rows", lambda platform: [("paged_attention", "xla")])
    monkeypatch.setattr(numerics.operation("paged_attention"), "run", broken)
    assert main(["--dry-run", "--quick", "--lower-only", "--only", "kernels", "--output", str(tmp_path)]) == 1
    assert "ValueError: no such shape" in capsys.readouterr().out
