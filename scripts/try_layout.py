"""Defines a sharding layout, and plans, runs, draws and compares it, on this machine's CPUs as virtual devices.

    python scripts/try_layout.py --out FOLDER                          # the demo model on 2 devices
    python scripts/try_layout.py --out FOLDER --model MODEL --devices 4    # without weights: random ones

Change ``LAYOUT`` to try one of your own; ``sharding/README.md`` says what a layout costs. In FOLDER, ``layout.svg``
shows where each weight and each page is, ``comparison.svg`` memory, collectives and times; the latter needs the extra
``research``. ``--layout scripts/try_layout.py:LAYOUT`` gives the layout to any command.
"""

import argparse
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.lab.compare.result import Comparison
from sharding import ShardingLayout

# As tensor_parallel, but every device has the whole vocabulary: no all-reduce after the embedding and no all-gather of
# logits, for the memory of the embedding and the head and the time to read the head.
LAYOUT = ShardingLayout(
    "whole_vocabulary", {"q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor"}
)


def try_layout(model: str, devices: int, out: Path, **settings: Any) -> Comparison:
    """Plan, draw, run and compare ``LAYOUT`` on devices along ``tensor``.

    Args:
        model: As in ``LLM``.
        devices: Number of virtual devices.
        out: Folder of the pictures.
        settings: Of the comparison, as in ``jaxserve.compare``.
    """
    mesh = f"tensor={devices}"
    print(jaxserve.plan(model, mesh, LAYOUT, device="h100"))
    (out / "layout.svg").write_text(jaxserve.show(model, mesh=mesh, layout=LAYOUT).svg, encoding="utf-8")
    candidates = {"layouts": [LAYOUT, "tensor_parallel"], "meshes": [mesh]}
    compared = jaxserve.compare(model, devices, **candidates, run=True, **settings)
    compared.draw(out / "comparison.svg")
    print(compared)
    return compared


def main() -> None:
    """Parse the flags and try the layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory with a config.json, or hub id (default: demo)")
    parser.add_argument("--devices", type=int, default=2, help="number of devices (default: 2)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try_layout(options.model, options.devices, options.out)


if __name__ == "__main__":
    main()
