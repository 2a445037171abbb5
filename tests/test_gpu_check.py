"""Test the GPU check without a GPU: its files, clock, processes, timing, toolchain, checkpoints, dry and tiny runs."""

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
from jaxserve.device.build import load_params, plan_engine
from jaxserve.models.loading import check_weights
from pallas_kernels.operation import Comparison
from pallas_kernels.registry import OPERATIONS
from scripts.gpu import device_events, engine, gemms, kernels, models, numerics, peers, probe, toolchain, workload
from scripts.gpu.compiling import compile_all, succeeded
from scripts.gpu.driver import MARK, CompilationError, Driver, serve
from scripts.gpu.figures import Deadline, Figure, Results, line, write_whole
from scripts.gpu.parts import HANG_S, Context, Item, SkippedError, Working, environment
from scripts.gpu.rows import rows
from scripts.gpu.timing import FLUSH_BYTES, MAX_SETS, Rotation, choose_sets, matching_leaves, tree_bytes
from scripts.gpu.wrong_results import WrongResultError
from scripts.gpu_check import NO_GPU, PARTS, load_part, main, parse, with_results

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
    assert len(again.runs) == 2
    again.finish("kernels/b")
    again.finish("kernels/c")
    assert not again.skipped and not again.failed
    assert Results(tmp_path, "run", ABOUT).figures == []


def test_what_failed_is_told_apart_and_can_run_again(tmp_path):
    first = Results(tmp_path, "run", ABOUT)
    first.add(figure("a case", part="numerics", value="fail", note="worst row 9", item="numerics/op/row"))
    first.add(figure("another", part="numerics", value="pass", item="numerics/op/row"))
    first.finish("numerics/op/row")
    first.fail("numerics/op/hangs", "hung")
    assert first.broken_items() == {"numerics/op/hangs": "hung"}
    assert first.wrong_items() == {"numerics/op/row": "a case failed: worst row 9"}
    kept = Results(tmp_path, "run", ABOUT, resumes=True)
    assert kept.done == ["numerics/op/row"] and set(kept.failed) == {"numerics/op/hangs", "numerics: a case"}
    again = Results(tmp_path, "run", ABOUT, resumes=True, retries=True)
    assert not again.failed and not again.done
    assert [f.name for f in again.figures] == ["another"]


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
        yield Working("thinking", 3.0)
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
        if name == "slow":
            for _ in range(4):
                time.sleep(0.4)
                tell("working", {"what": "compiling", "limit_s": 0.8})
        if name == "long_running":
            tell("figure", figure)
            time.sleep(60)
        if name == "hangs":
            tell("figure", figure)
            tell("working", {"what": "running x", "limit_s": 0.5})
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
    items = [Item(name, 0) for name in ("a", "dies", "slow", "b", "hangs", "c")]
    results, shown = driven(tmp_path, FakePart(*items))
    assert results.done == ["kernels/a", "kernels/slow", "kernels/b", "kernels/c"]
    assert results.failed == {
        "kernels/dies": "the process ended with code 9 while beginning dies",
        "kernels/hangs": "hung: nothing came for 0.5 s while running x",
    }
    assert results.broken_items() == results.failed
    assert [f.name for f in results.figures] == ["a", "slow", "b", "hangs", "c"]
    assert {f.name: f.item for f in results.figures}["b"] == "kernels/b"
    assert "noise yes" in shown and "FAILED kernels/hangs: hung: nothing came for 0.5 s while running x" in shown


def test_what_hung_is_not_run_again(tmp_path):
    results, _ = driven(tmp_path, FakePart(Item("hangs", 0)))
    resumed = Results(tmp_path, "run", ABOUT, resumes=True)
    Driver(resumed, ("false",), print).run_part("kernels", FakePart(Item("hangs")), TINY, Deadline(None))
    assert resumed.failed == results.failed


def test_a_hang_costs_45_seconds():
    assert HANG_S == 45 and Working("running").limit_s == HANG_S


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path):
    results, _ = driven(tmp_path, FakePart(Item("long", 1000), Item("long_running", 0), Item("b", 0)), limit_s=6.5)
    assert set(results.skipped) == {"kernels/long", "kernels/long_running", "kernels/b"}
    assert "needs about 1000 s" in results.skipped["kernels/long"]
    assert results.skipped["kernels/long_running"] == "the time limit was reached"
    assert [f.name for f in results.figures] == ["long_running"]


def test_a_process_that_does_not_start_fails_all_its_items(tmp_path):
    results, _ = driven(tmp_path, FakePart(Item("a", 0), Item("b", 0)), child="import sys; sys.exit(4)")
    reason = "the process ended with code 4 while starting or ending its process"
    assert results.failed == dict.fromkeys(("kernels/a", "kernels/b"), reason)


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
    assert [kind for kind, _ in told if kind[0] in "sdf" and kind != "figure"] == [
        "skipped",
        "failed",
        "done",
        "failed",
    ]
    assert ("working", {"what": "thinking", "limit_s": 3.0}) in told
    assert ("skipped", {"item": "absent", "reason": "not here"}) in told
    assert ("failed", {"item": "broken", "reason": "ValueError: first line"}) in told
    assert {content["value"] for kind, content in told if kind == "figure"} == {5}
    assert "second" in capsys.readouterr().err


def test_a_process_begins_nothing_that_would_not_end():
    code, told = served(Item("fine", 30.0), ends=0.0)
    assert code == 0 and [kind for kind, _ in told] == ["skipped"]


def test_a_gpu_that_is_not_there_is_no_cpu():
    """JAX would go on with the CPU, and its figures be taken for the GPU's, unless the platform is named."""
    base = {"JAX_PLATFORMS": "", "HOME": "/x", "XLA_FLAGS": "--one"}
    assert environment(base, kernels, Context())["JAX_PLATFORMS"] == "cuda,cpu"
    assert environment(base, kernels, TINY)["JAX_PLATFORMS"] == "cpu"
    assert environment(base, peers, Context())["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment(base, engine, Context())
    assert environment(base, engine, Context())["XLA_FLAGS"] == f"--one {device_events.XLA_FLAGS}"
    assert environment(base, kernels, Context(work="/w"))["JAX_COMPILATION_CACHE_DIR"] == "/w/cache-programs"
    assert "JAX_COMPILATION_CACHE_DIR" not in environment(base, engine, Context(work="/w"))  # an engine has its own


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
    seen = []
    timing = rotation.measure(
        compiled, lambda i: {"x": jnp.full(3, i + 1.0), "y": jnp.float32(2)}, seen.append, 3, 1e-4
    )
    assert timing.seconds > 0 and timing.num_sets == 4
    np.testing.assert_array_equal(seen, [[2, 2, 2]])


def test_nothing_is_timed_that_is_wrong():
    struct = {"x": jax.ShapeDtypeStruct((3,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    rotation = Rotation(scaled, struct, 4)

    def check(found):
        raise WrongResultError("wrong")

    with pytest.raises(WrongResultError):
        rotation.measure(rotation.compile(), lambda i: {"x": jnp.ones(3), "y": jnp.float32(2)}, check)


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
    seen = []

    def check(result):
        seen.extend(np.array(leaf) for leaf in result)  # the next run takes the arrays over

    def make(i):
        return jnp.zeros((8, 4)), jnp.zeros((8, 4)), jnp.ones(2)

    assert rotation.measure(compiled, make, check, 3, 1e-4).seconds > 0
    total, pool, other = seen
    assert float(total) == 2 and float(pool[0, 0]) == 3 and not other.any()  # after three runs, in the function's order


def test_bytes_of_keys_too():
    assert tree_bytes((jax.random.key(0), jnp.zeros((2, 3), jnp.bfloat16))) == 8 + 12


# ---------------------------------------------------------------- numerics and kernels


def figures(steps) -> list[Figure]:
    return [step for step in steps if isinstance(step, Figure)]


def test_right_results_pass_and_wrong_ones_are_told(monkeypatch):
    steps = list(numerics.run("paged_attention/xla", dataclasses.replace(TINY, seed=11)))
    found = figures(steps)
    assert len(found) == 4 and {f.value for f in found} == {"pass"}
    assert all(f"seed {numerics.FIXED_SEED}: worst row" in f.note and "seed 11: worst row" in f.note for f in found)
    assert all("20 runs alike" in f.note and "of padding left out" in f.note for f in found)
    assert Working("running paged_attention edges xla") in steps
    op = numerics.operation("paged_attention")
    monkeypatch.setattr(op, "compare", lambda *given: Comparison(2.5, "attention[3, 1]", 4, 0))
    found = figures(numerics.run("paged_attention/xla", TINY))
    assert {f.value for f in found} == {"fail"}
    assert found[0].note == "seed 7: worst row 2.5 of what is allowed at attention[3, 1]"


def test_a_race_is_told(monkeypatch):
    op = numerics.operation("paged_attention")
    monkeypatch.setattr(numerics, "_TINY", {"paged_attention": ("one_token",)})
    runs = []

    def unsteady(check, prepared):
        runs.append(len(runs))
        return jnp.zeros(3), [bytes([len(runs) == 15])]

    monkeypatch.setattr(numerics.Check, "_run_once", unsteady)
    monkeypatch.setattr(op, "compare", lambda *given: Comparison(0.0, "", 1, 0))
    (found,) = figures(numerics.run("paged_attention/xla", TINY))
    assert found.value == "fail" and found.note == "seed 7: run 15 has other bits than the first"


def test_results_that_are_not_written_are_likely_to_show():
    check = numerics.Check("paged_attention", "xla", "one_token")
    assert [(leaf.shape, bool(np.isnan(leaf).all())) for leaf in check._poison] == [((3, 4, 8), True)]


def test_a_case_that_breaks_is_a_failure_of_its_own(monkeypatch):
    op = numerics.operation("paged_attention")
    good = op.run

    def run(implementation, case, prepared):
        if case is op.CASES["edges"]:
            raise NotImplementedError("not this one")
        return good(implementation, case, prepared)

    monkeypatch.setattr(op, "run", run)
    found = {f.name.split()[1]: f for f in figures(numerics.run("paged_attention/xla", TINY))}
    assert found.pop("edges").note.endswith("NotImplementedError: not this one")
    assert found and {f.value for f in found.values()} == {"pass"}


def test_what_broke_is_not_run_and_what_was_wrong_is_not_timed():
    context = dataclasses.replace(
        TINY, broken={"paged_attention/xla": "hung"}, wrong={"truncation/xla": "a case failed"}
    )
    for part in (numerics, kernels):
        with pytest.raises(SkippedError, match="not run again: hung"):
            list(part.run("paged_attention/xla", context))
    with pytest.raises(SkippedError, match="not timed: a case failed"):
        list(kernels.run("truncation/xla", context))
    assert figures(numerics.run("truncation/xla", context))
    with pytest.raises(SkippedError, match="not run again: hung"):
        list(engine.run("llama-8b xla measure", context))


@pytest.mark.parametrize("is_tiny", [False, True])
def test_paged_attention_comes_first(is_tiny):
    found = rows(is_tiny)
    assert found[0][0] == "paged_attention" and len(set(found)) == len(found)
    assert any(row == "pallas-interpret" for _, row in found) == is_tiny
    for part in (probe, numerics, kernels):
        assert part.items(Context(is_tiny=is_tiny))[0].name.startswith("paged_attention/")


def test_the_probe_has_a_case_of_each_operation():
    for name in OPERATIONS:
        assert probe.CASES[name] in numerics.operation(name).DEVICE_CASES


def test_kernels_are_stated_as_shares():
    found = figures(kernels.run("paged_attention/xla", TINY))
    assert found and all(f.unit == "us" and f.share and f.roofline for f in found), found
    assert "sets of" in found[0].note and "fits into the L2 cache" in found[0].note
    assert "result compared: worst row" in found[0].note


def test_benches_compare_their_results(monkeypatch):
    op = numerics.operation("paged_attention")
    monkeypatch.setattr(op, "compare", lambda *given: Comparison(3.0, "attention[0, 0]", 1, 0))
    found = figures(kernels.run("paged_attention/xla", dataclasses.replace(TINY, seed=5)))
    note = "not timed: worst row 3 of what is allowed at attention[0, 0], seed 5"
    assert [(f.value, f.note) for f in found] == [("fail", note)] * 2
    monkeypatch.setattr(gemms, "compare_rows", lambda *given: Comparison(3.0, "product[1]", 1, 0))
    found = figures(gemms.run("llama-8b decode", TINY))
    assert found and {f.value for f in found} == {"fail"}


def test_benches_that_do_not_fit_are_noted(monkeypatch):
    monkeypatch.setattr(kernels, "choose_sets", lambda touched, held: None)
    with pytest.raises(SkippedError, match="three sets of 0 GB do not fit"):
        list(kernels.run("paged_attention/xla", TINY))


def test_programs_that_do_not_compile_stand_in_their_own_place():
    def broken():
        raise ValueError("no such instruction")

    steps = compile_all({"good": lambda: 3, "broken": broken})
    words = []
    try:
        while True:
            words.append(next(steps))
    except StopIteration as stop:
        found = stop.value
    assert succeeded(found["good"]) == 3
    with pytest.raises(CompilationError, match="ValueError: no such instruction"):
        succeeded(found["broken"])
    assert [word.what for word in words] == [
        "compiling 2 programs",
        "compiling 2 programs, of which 1 are ready",
        "compiling 2 programs, of which 2 are ready",
    ]


def test_gemms_have_the_rows_that_the_engine_has():
    assert gemms.DECODE == (2, 8, 16, 64, 256)


# ---------------------------------------------------------------- device events


def plane(name: str, **lines: list[tuple[float, float]]):
    made = []
    for line_name, events in lines.items():
        spans = [
            SimpleNamespace(name=f"{'fusion' if duration < 900 else 'copy'}_{i}", start_ns=start, duration_ns=duration)
            for i, (start, duration) in enumerate(events)
        ]
        made.append(SimpleNamespace(name=line_name.replace("_", " "), events=spans))
    return SimpleNamespace(name=name, lines=made)


def test_the_device_s_time_is_that_of_its_events():
    """Overlapping events of two streams count once; other lines and other GPUs do not count."""
    found = device_events.busy_time(
        [
            plane("/host:CPU", Stream_1=[(0, 1e9)]),
            plane("/device:GPU:1", Stream_1=[(0, 1e9)]),
            plane(
                "/device:GPU:0",
                Stream_1=[(3000, 1000), (1000, 500)],
                Stream_2=[(1200, 800), (3100, 100)],
                XLA_Modules=[(0, 9000)],
            ),
        ]
    )
    assert found is not None and found.num_events == 4
    assert found.span_s == pytest.approx(3e-6) and found.busy_s == pytest.approx(2e-6)
    assert found.idle_s == pytest.approx(1e-6)
    assert [(name, count) for name, count, _ in found.kernels] == [("fusion", 3), ("copy", 1)]
    assert [each.total_s for each in found.kernels] == pytest.approx([1.4e-6, 1e-6])


def test_a_profile_without_a_gpu_has_no_time():
    assert device_events.busy_time([plane("/host:CPU", Stream_1=[(0, 10)])]) is None
    assert device_events.busy_time([plane("/device:GPU:0", Stream_1=[])]) is None
    assert device_events.device_time(lambda: None) is None  # of a CPU


def test_the_gap_is_the_idle_time_beyond_a_step_s_own():
    kernels = (device_events.KernelTime("gemm_fusion", 64, 0.008),)
    times = device_events.DeviceTime(0.012, 0.010, 500), device_events.DeviceTime(0.0104, 0.010, 480, kernels)
    decode = workload.Decode(1, 64, 9, 0.006, 0.005, 0.007, *times, num_profiled=2)
    found = engine._gap_figure("x", decode)
    assert found.value == pytest.approx(800) and found.unit == "us"
    assert "idle 1000 us per step, busy 5.000 ms" in found.note and "32 of gemm_fusion 4000 us" in found.note
    assert engine._gap_figure("x", decode._replace(stepping=None)).value is None


# ---------------------------------------------------------------- the toolchain


def fake_toolkit(folder: Path, version: str, has_libdevice: bool = True) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "ptxas"
    program.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version[:4]}, V{version}\n")
    program.chmod(0o755)
    if has_libdevice:
        (folder / "nvvm" / "libdevice").mkdir(parents=True)
    return folder


def test_the_assembler_that_is_named_wins(tmp_path, monkeypatch):
    old, new = fake_toolkit(tmp_path / "old", "12.8.93"), fake_toolkit(tmp_path / "new", "13.5.37")
    bare = fake_toolkit(tmp_path / "bare", "13.9.1", has_libdevice=False)
    monkeypatch.setattr(toolchain, "_roots", lambda environment: iter([tmp_path / "absent", old, new, bare]))
    assert toolchain.find_assembler({}) == (new, (13, 5, 37))
    assert toolchain.find_assembler({"CUDA_ROOT": str(old)}) == (old, (12, 8, 93))
    assert toolchain.find_assembler({"CUDA_ROOT": str(tmp_path / "absent")}) == (new, (13, 5, 37))
    found = toolchain.find_assembler({})
    assert toolchain.variables({"PATH": "/bin"}, found) == {"CUDA_ROOT": str(new), "PATH": f"{new}/bin:/bin"}
    assert toolchain.versions(found)["ptxas"] == f"13.5.37 ({new}/bin/ptxas)"


def test_where_toolkits_are_looked_for(tmp_path, monkeypatch):
    path = fake_toolkit(tmp_path / "toolkit", "13.0.88")
    monkeypatch.setattr(toolchain, "_package_folders", lambda package: [tmp_path / package])
    found = list(toolchain._roots({"CUDA_HOME": "/opt/cuda", "PATH": str(path / "bin")}))
    assert found[:3] == [tmp_path / "nvidia.cu13", tmp_path / "nvidia.cuda_nvcc", Path("/opt/cuda")]
    assert found[-2:] == [path, tmp_path / "triton" / "backends" / "nvidia"]


def test_without_an_assembler_nothing_is_set(monkeypatch):
    monkeypatch.setattr(toolchain, "_roots", lambda environment: iter(()))
    assert toolchain.find_assembler({}) is None and toolchain.variables({"PATH": "/bin"}, None) == {}
    lines = toolchain.missing({**dict.fromkeys(toolchain.PACKAGES, "1.0"), "ptxas": "not found"})
    assert len(lines) == 1 and lines[0].startswith("missing: ptxas")


def test_missing_wheels_have_a_line_each():
    found = {**dict.fromkeys(toolchain.PACKAGES, "1.0"), "ptxas": "13.0.88", "llguidance": "not installed"}
    (text,) = toolchain.missing({**found, "jax-cuda12-plugin": "not installed"})
    assert text.startswith("missing: llguidance, which the engine part cannot run without; install its wheel")


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("model", models.CONFIGS)
def test_checkpoints_can_be_planned_and_loaded(tmp_path, model):
    config = models.config_of(model, is_tiny=True)
    written_bytes = models.write_checkpoint(tmp_path, config, shard_bytes=40_000)
    assert models.has_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert written_bytes == models.sizes_of(config).weight_bytes
    plan = plan_engine(EngineConfig(model=str(tmp_path), attention_backend="xla", **workload.Workload.of(TINY).engine))
    check_weights(plan.directory, plan.models[0].abstract_model)
    params = load_params(plan, plan.models[0])
    assert plan.needs.weights == 2 * written_bytes  # float32 on a CPU
    assert all(bool(jnp.isfinite(array).all()) and float(jnp.abs(array).max()) > 0 for array in params)


def test_the_engine_s_steps_are_timed(tmp_path, monkeypatch):
    models.write_checkpoint(tmp_path, models.config_of("llama-8b", is_tiny=True))
    settings = {**workload.Workload.of(TINY).engine, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    settings["compile_sizes"] = {"decode": [2], "mixed": [16]}
    with LLM(str(tmp_path), **settings, attention_backend="xla", compilation_cache_dir="") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 3
        runs = []
        monkeypatch.setattr(workload, "device_time", lambda work: runs.append(work()))
        found = workload.decode(llm, 2, 20, 4)
        assert len(runs) == 2  # steps of the engine, and one of them again and again
        assert found.num_steps == 4 and found.step_s > 0 and found.stepping is None
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
    rows = [row for row in engine.OPERATIONS["paged_attention"] if row in engine.BACKENDS]
    kinds = ("first", "measure", "warm")
    assert names == ["llama-8b write", *(f"llama-8b {row} {what}" for row in rows for what in kinds)]


def test_the_first_engine_has_the_fewest_programs():
    for context in (TINY, Context()):
        first, whole = workload.Workload.first_of(context), workload.Workload.of(context)
        sizes = first.engine["compile_sizes"]
        assert [len(sizes[kind]) for kind in ("decode", "mixed")] == [1, 1]
        assert first.decodes == whole.decodes[:1] and first.prefills[0] <= first.engine["max_num_batched_tokens"]
    assert whole.engine["compile_sizes"] == {"decode": [2, 64, 256], "mixed": [2048, 8192]}


def test_a_start_with_programs_of_a_killed_run_is_a_warm_one(tmp_path):
    begun = engine.Begun(SimpleNamespace(load_s=1.0, compile_s=2.0), 4.0, 3.0)
    assert engine._start_figure("start cold", False, begun).goal == ""
    assert engine._start_figure("start warm", True, begun).goal == "10 s"


# ---------------------------------------------------------------- the command


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("scripts.gpu_check.find_gpu", lambda: None)
    assert main(["--only", "ceilings"]) == NO_GPU
    assert "no NVIDIA GPU found" in capsys.readouterr().err


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--only", "kernels,speed"])
    assert (
        "unknown part speed; parts: ceilings, probe, numerics, kernels, gemms, compile, engine, drafts, peers"
        in capsys.readouterr().err
    )


def test_every_part_has_what_a_part_needs():
    for name in PARTS:
        part = load_part(name)
        items = part.items(Context())
        assert items and len({item.name for item in items}) == len(items)
        assert all(item.estimate_s > 0 for item in items)
        assert isinstance(part.IS_ALONE, bool)


def test_results_of_the_run_are_handed_on(tmp_path):
    results = Results(tmp_path, "run", ABOUT)
    assert with_results(Context(), results).least_s(1e9) is None
    results.fail("probe/paged_attention/mosaic", "hung")
    results.fail("engine/llama-8b mosaic measure", "hung")
    results.add(figure("x", part="numerics", value="fail", note="n", item="numerics/truncation/triton"))
    found = with_results(Context(), results)
    assert found.broken == {"paged_attention/mosaic": "hung"}
    assert found.wrong == {"truncation/triton": "x failed: n"}
    results.add(figure("copy bandwidth", part="ceilings", value=4000.0, unit="GB/s"))
    results.add(figure("bf16 matrix rate", part="ceilings", value=800.0, unit="TFLOP/s"))
    context = with_results(Context(), results)
    assert context.least_s(4e12) == 1.0 and context.least_s(4e12, 1.6e15) == 2.0


def test_a_run_on_this_machine_s_own_sizes(tmp_path):
    """The whole way, from the command to the files, for the parts that need neither a GPU nor long."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--size", "tiny", "--only", "ceilings"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {"copy bandwidth", "bf16 matrix rate"} <= {each["name"] for each in content["figures"]}
    assert "ceilings/jax" in content["done"] and "seed" in content and "jax" in content["versions"]


def test_a_first_run_s_commands(tmp_path):
    """Four commands of at most nine minutes; what they leave is copied even where one failed."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >>{tmp_path}/calls\n'
        "mkdir -p build/gpu_check/results\n"
        'for ending in json md; do echo "$3" >build/gpu_check/results/test_run.$ending; done\n'
        '[ "$3" != engine ]\n'
    )
    python.chmod(0o755)
    script = (REPOSITORY / "scripts" / "gpu_first_run.sh").read_text().replace("name=first_run", "name=test_run")
    copy = tmp_path / "scripts" / "gpu_first_run.sh"
    copy.parent.mkdir()
    copy.write_text(script)
    settings = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", str(copy)], env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    calls = [parse(text.split()[1:]) for text in (tmp_path / "calls").read_text().splitlines()]
    assert [call.only for call in calls] == [
        ("probe",),
        ("numerics", "kernels"),
        ("engine",),
        ("compile", "gemms", "drafts", "peers"),
    ]
    assert [call.resume for call in calls] == [False, True, True, True]
    assert all(call.time_limit + 30 < 540 and call.name == "test_run" for call in calls)
    assert (tmp_path / "out" / "test_run.json").read_text() == "compile,gemms,drafts,peers\n"
    done = subprocess.run(["bash", str(copy), "5"], env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "unknown stage '5'; stages: wheels, 1, 2, 3, 4" in done.stderr


@pytest.mark.slow
def test_a_run_with_a_hang_and_a_crash_is_complete_and_honest(tmp_path):
    """Every part at sizes for a CPU, with kernels that hang, end their process and are wrong (``faulty_gpu_check.py``).

    Each costs its own turn once, nothing that failed is timed, and the files say of every item what became of it.
    """
    command = [sys.executable, str(REPOSITORY / "tests" / "faulty_gpu_check.py"), "--size", "tiny", "--quick"]
    command += ["--time-limit", "0", "--output", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    values = {(each["part"], each["name"]): each["value"] for each in content["figures"]}
    failed, skipped = content["failed"], content["skipped"]
    # What hung was killed 45 s after its last word, with the figures it had given; nothing of it ran again.
    hung = "hung: nothing came for 45 s while running paged_attention window pallas-interpret"
    assert failed["numerics/paged_attention/pallas-interpret"] == hung
    assert values["numerics", "paged_attention mixed pallas-interpret"] == "pass"
    assert skipped["kernels/paged_attention/pallas-interpret"] == f"not run again: {hung}"
    crashed = "the process ended with code 139 while running qkv_write three_tokens pallas-interpret"
    assert failed["numerics/qkv_write/pallas-interpret"] == crashed
    assert skipped["kernels/qkv_write/pallas-interpret"] == f"not run again: {crashed}"
    assert values["probe", "truncation few_tokens pallas-interpret"] == "fail"
    assert "tokens wrongly kept or dropped" in failed["numerics: truncation few_tokens pallas-interpret"]
    assert skipped["kernels/truncation/pallas-interpret"].startswith("not timed: truncation few_tokens")
    # All others had their turn.
    for operation in ("paged_attention", "qkv_write", "truncation", "int4_matmul", "grouped_matmul"):
        assert {f"{part}/{operation}/xla" for part in ("probe", "numerics", "kernels")} <= set(content["done"])
    assert values["engine", "llama-8b xla: decode, batch 4, context 64"] > 0
    assert values["compile", "nothing tuned: compiling"] > 0
    assert values["peers", "paged_attention many_rows of JAX"] > 0
    context = Context(is_tiny=True, is_quick=True)
    every = {f"{part}/{item.name}" for part in PARTS for item in load_part(part).items(context)}
    assert every == {*content["done"], *skipped, *(item for item in failed if item in every)}
    assert {each["item"].partition("/")[0] for each in content["figures"]} == set(PARTS)
    assert (tmp_path / "gpu_check.md").read_text().count("\n## ") == len(PARTS) + 2
    assert list((tmp_path / "work").glob("cache-*"))  # something was skipped, so a run can go on from here
    for package in ("jax", "jaxlib", "flax", "triton", "ptxas"):
        assert content["versions"][package]


def test_a_dry_run_lists_every_part(tmp_path, capsys, monkeypatch):
    for name in ("probe", "numerics", "kernels"):
        monkeypatch.setattr(f"scripts.gpu.{name}.rows", lambda is_tiny: [("paged_attention", "xla")])
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

    monkeypatch.setattr("scripts.gpu.kernels.rows", lambda is_tiny: [("paged_attention", "xla")])
    monkeypatch.setattr(numerics.operation("paged_attention"), "run", broken)
    assert main(["--dry-run", "--quick", "--lower-only", "--only", "kernels", "--output", str(tmp_path)]) == 1
    assert "ValueError: no such shape" in capsys.readouterr().out
