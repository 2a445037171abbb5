"""Measures this machine, predicts the decode steps of every mesh and layout of 4 devices, and measures those too.

    python scripts/predict_steps.py --machine "2 CPUs of …"    # about 25 minutes, with nothing else running

Writes ``scripts/charts/predicted_steps.json``: in each round what ``jaxserve plan --calibrate`` measures, and the steps
of a dense model and one with experts, with random weights, as predicted from that alone and as measured after it.
``scripts/draw_sharding.py`` makes the table and the picture of ``sharding/README.md`` from it.
"""

import argparse
import datetime
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxserve import compare  # noqa: E402
from jaxserve.lab.calibration import calibrate  # noqa: E402
from jaxserve.lab.devices import Device  # noqa: E402

RESULTS = ROOT / "scripts" / "charts" / "predicted_steps.json"
NUM_DEVICES, CONTEXT, BATCH_SIZES = 4, 64, (1, 32)
_ALIKE = 1.15  # measured times that differ by a smaller factor are not compared
_COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        **_COMMON,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        **_COMMON,
    },
}
"""The ``config.json`` of each model: 120 MiB and 93 MiB of weights in float32, more than caches hold."""


class Step(NamedTuple):
    """A decode step.

    Attributes:
        model: One of ``MODELS``.
        name: Mesh and layout.
        batch: Number of sequences.
        predictions_s: Time in seconds that each round's calibration predicts.
        rounds_s: Measured time in each round.
    """

    model: str
    name: str
    batch: int
    predictions_s: tuple[float, ...]
    rounds_s: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        """The mean of the predictions."""
        return statistics.fmean(self.predictions_s)

    @property
    def measured_s(self) -> float:
        """The mean of the rounds."""
        return statistics.fmean(self.rounds_s)

    @property
    def error(self) -> float:
        """By how much of the measured time the prediction is too long."""
        return self.predicted_s / self.measured_s - 1


def difference_of_rounds(steps: Sequence[Step]) -> float:
    """Return the median of the steps' largest round over their smallest, minus 1."""
    return statistics.median(max(step.rounds_s) / min(step.rounds_s) - 1 for step in steps)


def median_error(steps: Sequence[Step]) -> float:
    """Return the median of the errors' sizes."""
    return statistics.median(abs(step.error) for step in steps)


def kendall_tau(steps: Sequence[Step]) -> float:
    """Return Kendall's rank correlation over the pairs of steps whose measured times differ by more than 15 %.

    Pairs in the same order minus pairs in the opposite order, divided by their number.
    """
    signs = [
        math.copysign(1, (first.measured_s - second.measured_s) * (first.predicted_s - second.predicted_s))
        for first, second in itertools.combinations(steps, 2)
        if max(first.measured_s, second.measured_s) > _ALIKE * min(first.measured_s, second.measured_s)
    ]
    return sum(signs) / len(signs)


def measure(model: str, config: dict[str, Any], device: Device) -> list[Step]:
    """Predict and measure the steps of a model.

    Raises:
        RuntimeError: A candidate did not run, or its greedy tokens differ from those of one device.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        sizes = {"batch_sizes": BATCH_SIZES, "context": CONTEXT}
        found = compare(folder, NUM_DEVICES, device=device, run=True, **sizes)
    steps = []
    for candidate, measured in found.rows:
        if measured is None or not measured.is_equal:
            raise RuntimeError(f"{model} on {candidate.name}: expected the tokens of one device, got {measured}")
        for batch, measured_s in measured.step_s.items():
            predicted_s = candidate.plan.decode_of(batch).step_s
            steps.append(Step(model, candidate.name, batch, (predicted_s,), (measured_s,)))
    return steps


def read() -> tuple[dict[str, Any], list[Step]]:
    """Return the committed results, and their steps."""
    found = json.loads(RESULTS.read_text())
    steps = [Step(**step) for step in found["steps"]]
    return found, [
        step._replace(predictions_s=tuple(step.predictions_s), rounds_s=tuple(step.rounds_s)) for step in steps
    ]


def main() -> None:
    """Calibrate, predict, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="what the machine is, for the page")
    parser.add_argument("--rounds", type=int, default=2, help="how often to measure everything (default: %(default)s)")
    options = parser.parse_args()
    devices, rounds = list[Device](), list[list[Step]]()
    for _ in range(options.rounds):
        devices.append(calibrate(NUM_DEVICES))
        rounds.append([step for model, config in MODELS.items() for step in measure(model, config, devices[-1])])
    steps = [
        own[0]._replace(
            predictions_s=tuple(step.predicted_s for step in own), rounds_s=tuple(step.measured_s for step in own)
        )
        for own in zip(*rounds, strict=True)
    ]
    for model, batch in itertools.product(MODELS, BATCH_SIZES):
        own = [step for step in steps if (step.model, step.batch) == (model, batch)]
        found = f"{model}, batch {batch}: median error {median_error(own):.3f}, Kendall's tau {kendall_tau(own):.2f}"
        sys.stdout.write(f"{found}\n")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    about = {
        "machine": options.machine,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    calibrations = [device.as_dict() for device in devices]
    result = {**about, "devices": calibrations, "steps": [step._asdict() for step in steps]}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
