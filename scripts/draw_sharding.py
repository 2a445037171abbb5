"""Computes the numbers of ``sharding/README.md`` and draws its pictures, from plans; no devices or weights are needed.

    pip install 'jaxserve[research]'
    python scripts/draw_sharding.py    # about two minutes; rewrites the page's examples and four pictures

Steps predicted and measured are those of ``scripts/predict_steps.py``. The other models are those of
``scripts/charts/sharding_models.json``; ``scripts/sharding_numbers.py`` has the examples.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxserve.lab.hardware import LINKS  # noqa: E402
from jaxserve.lab.links import collective_seconds  # noqa: E402
from jaxserve.lab.report import size  # noqa: E402
from scripts import predict_steps  # noqa: E402
from scripts.sharding_numbers import HOSTS, SECTIONS, Plans  # noqa: E402

PAGE, CHARTS = ROOT / "sharding" / "README.md", ROOT / "scripts" / "charts"
GIB = 1 << 30
BLUE, AMBER, GREEN, RED, DARK = "#2563eb", "#f59e0b", "#86efac", "#dc2626", "#17202e"


def main() -> None:
    """Rewrite the page and draw the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder))
        PAGE.write_text(with_numbers(PAGE.read_text(), {name: make(plans) for name, make in SECTIONS.items()}))
        figures = {"memory": draw_memory(plans), "all_reduce": draw_all_reduce(), "hosts": draw_hosts(plans)}
        figures["predicted"] = draw_predicted()
    for name, figure in figures.items():
        path = CHARTS / f"sharding_{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
        sys.stdout.write(f"{path}\n")


def with_numbers(page: str, examples: Mapping[str, str]) -> str:
    """Return a page with examples in place of those between its markers.

    Raises:
        ValueError: The page has no markers of an example.
    """
    for name, text in examples.items():
        pattern = rf"(<!-- numbers: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, page, flags=re.DOTALL):
            raise ValueError(f"the page has no <!-- numbers: {name} --> followed by <!-- end -->; add both lines")
        page = re.sub(pattern, lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL)
    return page


def draw_memory(plans: Plans) -> Figure:
    """Draw the memory of a device of Qwen2.5-14B, on 1 to 8 cards of 24 GiB."""
    found = [plans.on_one_card(count) for count in (1, 2, 4, 8)]
    stages = [plan.fullest for plan in found]
    figure, axes = _figure(2.9)
    stacks = {
        "weights": (BLUE, [stage.weights for stage in stages]),
        "steps, sequences, reserve": (AMBER, [s.step_reserve + s.slots + s.reserve for s in stages]),
        "KV pages": (GREEN, [max(0, stage.left) for stage in stages]),
    }
    ends = _stack(
        axes, {name: (colour, [value / GIB for value in values]) for name, (colour, values) in stacks.items()}
    )
    limit = found[0].device.memory_bytes / GIB
    axes.axvline(limit, color=DARK, linestyle="--", linewidth=1, label=f"memory, {limit:.0f} GiB")
    for row, (plan, end) in enumerate(zip(found, ends, strict=True)):
        text = f"{plan.kv_tokens:,} KV tokens" if plan.kv_tokens else "too large"
        axes.text(max(end, limit) + 0.4, row, text, va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [f"{plan.num_devices} × {plan.device.name}" for plan in found])
    axes.set(xlabel="GiB of a device", xlim=(0, 37), ylim=(3.6, -0.6))
    axes.set_title("Qwen2.5-14B, bfloat16, tensor_parallel", fontsize=10)
    return _with_legend(figure, axes)


def draw_all_reduce() -> Figure:
    """Draw the time of an all-reduce of 8 devices against its bytes, over four links."""
    figure, axes = _figure(3.6)
    sizes = [2.0**power for power in range(10, 29)]
    for name, colour in {"pcie4": RED, "infiniband-ndr": AMBER, "nvlink-a100": GREEN, "nvlink-h200": BLUE}.items():
        times = [collective_seconds("all-reduce", int(num_bytes), 8, LINKS[name]) for num_bytes in sizes]
        axes.plot(sizes, [time_s * 1e6 for time_s in times], color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="bytes of the result on each device", ylabel="time, µs", ylim=(1, 1e5), xlim=(sizes[0], sizes[-1]))
    axes.set_xticks(sizes[::3], [size(int(num_bytes)) for num_bytes in sizes[::3]])
    for num_bytes, text in ((16 << 10, "1 token"), (512 << 10, "32 tokens"), (32 << 20, "2,048 tokens")):
        axes.axvline(num_bytes, color=DARK, linestyle=":", linewidth=1)
        axes.text(num_bytes * 0.88, 7e4, text, fontsize=9, ha="right", va="top")
    axes.set_title("An all-reduce of 8 devices, modelled; dotted: hidden states of Llama-3.1-70B", fontsize=10)
    return _with_legend(figure, axes)


def draw_hosts(plans: Plans) -> Figure:
    """Draw a decode and a prefill step of Llama-3.1-70B on two hosts of 8 devices, for several meshes."""
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    found = [plans.of("Llama-3.1-70B", mesh, device="h100") for mesh in HOSTS]
    panels = {"decode, 1 sequence": (left, [plan.decode_of(1) for plan in found])}
    panels["prefill, 2,048 tokens of a prompt"] = right, [plan.prefill for plan in found]
    for title, (axes, steps) in panels.items():
        exchanged = [1e3 * step.communication_s for step in steps]
        rest = [1e3 * step.latency_s - time for step, time in zip(steps, exchanged, strict=True)]
        _stack(axes, {"memory or arithmetic": (BLUE, rest), "communication": (RED, exchanged)})
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="latency of the step, ms", ylim=(len(found) - 0.4, -0.6))
        _plain(axes)
    left.set_yticks(range(len(found)), HOSTS)
    figure.suptitle("Llama-3.1-70B on 2 hosts of 8 H100, modelled", fontsize=10, fontweight="bold")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def draw_predicted() -> Figure:
    """Draw the predicted against the measured time of the steps of every mesh and layout of 4 devices."""
    _, steps = predict_steps.read()
    figure = Figure(figsize=(8.4, 4.0), layout="constrained")
    panels = figure.subplots(1, len(predict_steps.MODELS))
    for axes, model in zip(panels, predict_steps.MODELS, strict=True):
        own = [step for step in steps if step.model == model]
        times = [1e3 * time_s for step in own for time_s in (step.measured_s, step.predicted_s)]
        ends = [min(times) / 1.2, max(times) * 1.2]
        axes.plot(ends, ends, color=DARK, linewidth=1, label="equal")
        axes.fill_between(
            ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color=GREEN, alpha=0.3, label="within 30 %"
        )
        for batch, colour in zip(predict_steps.BATCH_SIZES, (AMBER, BLUE), strict=True):
            found = [step for step in own if step.batch == batch]
            measured, predicted = [step.measured_s * 1e3 for step in found], [step.predicted_s * 1e3 for step in found]
            axes.scatter(measured, predicted, 16, color=colour, label=f"{batch} sequence{'s' * (batch > 1)}", zorder=3)
        _plain(axes)
        axes.grid(linewidth=0.4)
        axes.set_title(model, fontsize=10)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
        axes.set_aspect("equal")
        ticks = [tick for tick in (2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100) if ends[0] < tick < ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_minor_locator(NullLocator())
    figure.suptitle("Decode steps of every mesh and layout of 4 virtual CPU devices", fontsize=10, fontweight="bold")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_axisbelow(True)


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, stacks: Mapping[str, tuple[str, list[float]]]) -> list[float]:
    """Draw stacked horizontal bars, and return their ends."""
    ends = [0.0] * len(next(iter(stacks.values()))[1])
    for name, (colour, values) in stacks.items():
        axes.barh(range(len(values)), values, 0.65, left=ends, color=colour, label=name)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    return ends


if __name__ == "__main__":
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
    main()
