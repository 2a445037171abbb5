"""Draws how evenly a model's experts are used: a heat map with a row per layer and a column per expert.

    pip install 'jaxserve[research]'
    python scripts/draw_expert_load.py --model MODEL --prompts scripts/demo_prompts.txt --out expert_load.png

Runs the prompts of a file, one per line, and counts the tokens that each expert computes, of prompts and completions. A
cell is that number divided by an even share; 1 means that the expert has its fair share of the tokens. The ending of
``--out`` is the format: png or svg.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from jaxserve import LLM, SamplingParams

MOST_WRITTEN = 16  # experts whose cells have their number written in them
MOST_TICKS = 16


def main() -> None:
    """Parse the flags, run the prompts and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="a text file with a prompt per line")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--out", type=Path, default=Path("expert_load.png"))
    options = parser.parse_args()
    prompts = [line for line in options.prompts.read_text().splitlines() if line.strip()]
    if not prompts:
        parser.error(f"{options.prompts} has no prompts; it needs one per line")
    with LLM(options.model, expert_load_metrics=1) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=options.max_tokens))
        load, layers = llm.expert_load(), llm.plan.expert_layers
    draw(load, layers, f"{Path(options.model).name}, {len(prompts)} prompts").savefig(options.out, dpi=150)
    print(options.out)


def relative(load: Int[np.ndarray, "layers E"]) -> Float[np.ndarray, "layers E"]:
    """Return each expert's tokens divided by the mean of its layer; zeros for a layer without tokens."""
    return load / np.maximum(load.mean(1, keepdims=True), 1e-9)


def draw(load: Int[np.ndarray, "layers E"], layers: Sequence[int], name: str) -> Figure:
    """Draw a heat map.

    Args:
        load: Tokens that each expert of each layer computed.
        layers: Index of each layer in the model.
        name: Model and prompts, for the title.
    """
    shares = relative(load)
    num_layers, num_experts = shares.shape
    width, height = np.clip(2.6 + 0.42 * num_experts, 6.5, 13), np.clip(1.9 + 0.3 * num_layers, 3.2, 9)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes, largest = figure.subplots(), max(2.0, float(shares.max()))
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=largest)
    image = axes.imshow(shares, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer")
    total = f"{int(load.sum(1).max()):,} routed tokens per layer; each counts once for every expert that computes it"
    axes.set_title(f"Expert load: {name}\n{total}", fontsize=10)
    axes.set_xticks(range(0, num_experts, -(-num_experts // MOST_TICKS)))
    rows = range(0, num_layers, -(-num_layers // MOST_TICKS))
    axes.set_yticks(rows, [str(layers[row]) for row in rows])
    ticks = [*np.linspace(0, 1, 5), *np.linspace(1, largest, 5)[1:]]  # the scale has two halves
    bar = figure.colorbar(image, ax=axes, pad=0.02, ticks=ticks, format="%.2g")
    bar.set_label("tokens, relative to an even share")
    if num_experts <= MOST_WRITTEN and num_layers <= MOST_WRITTEN:
        _write_numbers(axes, shares, norm)
    return figure


def _write_numbers(axes: Axes, shares: Float[np.ndarray, "layers E"], norm: TwoSlopeNorm) -> None:
    """Write each cell's number in it, in a colour that its background lets be read."""
    for (row, column), share in np.ndenumerate(shares):
        is_dark = abs(float(norm(share)) - 0.5) > 0.3
        colour = "white" if is_dark else "black"
        axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color=colour)


if __name__ == "__main__":
    matplotlib.use("agg")
    main()
