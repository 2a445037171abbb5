"""Measures quantized weights in one run: products, our forms against our bfloat16, and other engines on the same files.

    python scripts/bench_quantized.py --size 1b --out table.json --markdown table.md
    python scripts/bench_quantized.py --size 15m --tiny --rounds 2 --megabytes 4 --out t.json --markdown t.md

Engines take turns: each round runs all of them once, one after the other, each in a process of its own, with the
workloads of ``../shared/bench/peers`` (A is one stream, B and C have 32 requests). A ratio is the median over rounds,
with the 95 % interval of their logarithms' mean. Other engines run by ``compare_all.sh`` there, where they have been
prepared (``prepare_peers.sh``); what is missing is named. The files are written after each round, and ``--resume`` adds
rounds to those of a file, also of other engines or workloads. Run it on a machine without other work: the table says
the load that it began with.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5 % quantile of Student's distribution with 1, 2, 3, … degrees of freedom."""
_NORMAL = 1.96
_INT4: Mapping[str, Any] = {"linear": "int4_group", "head": "int8_per_channel_weight_only"}


class Form(NamedTuple):
    """A way to store and compute weights.

    Attributes:
        settings: ``quantization_config`` of the engine.
        dtype: Element type of the other weights.
    """

    settings: Mapping[str, Any]
    dtype: str = "bfloat16"


class Ours(NamedTuple):
    """Our engine on a model.

    Attributes:
        file: The model, relative to the folder of files; ``SIZE`` stands for the shape.
        form: How its weights are stored.
    """

    file: str
    form: Form


_FLOAT = "SIZE-bf16"
BFLOAT16 = "bfloat16"
ENGINES: Mapping[str, Ours | str] = {
    BFLOAT16: Ours(_FLOAT, Form({})),
    "int8": Ours(_FLOAT, Form({"linear": "int8_w8a8"})),
    "int8, head too": Ours(_FLOAT, Form({"linear": "int8_w8a8", "head": "int8_w8a8"})),
    "int4, float activations": Ours(_FLOAT, Form(_INT4)),
    "int4, int8 activations": Ours(_FLOAT, Form({**_INT4, "activations": "int8"})),
    "vLLM, W8A8": "vllm w8a8",
    "W8A8 file": Ours("SIZE-w8a8", Form({})),
    "llama.cpp, Q8_0": "llama.cpp q8_0",
    "Q8_0 file, int8 activations": Ours("gguf/SIZE-q8_0.gguf", Form({"activations": "int8"})),
    "Q8_0 file, float activations": Ours("gguf/SIZE-q8_0.gguf", Form({})),
    "llama.cpp, Q4_K_M": "llama.cpp q4_k_m",
    "Q4_K_M file, int8 activations": Ours("gguf/SIZE-q4_k_m.gguf", Form({"activations": "int8"})),
    "Q4_K_M file, float activations": Ours("gguf/SIZE-q4_k_m.gguf", Form({})),
    "OpenVINO, int8": "openvino int8 weights",
    "OpenVINO, int4": "openvino int4 weights",
    "vLLM, bfloat16": "vllm bf16",
    "llama.cpp, bfloat16": "llama.cpp bf16",
}
"""What takes turns: ours, and rows of ``compare_all.sh`` by their names there."""
RATIOS: Sequence[tuple[str, str]] = (
    ("int8", BFLOAT16),
    ("int8, head too", BFLOAT16),
    ("int4, float activations", BFLOAT16),
    ("int4, int8 activations", BFLOAT16),
    ("W8A8 file", "vLLM, W8A8"),
    ("Q8_0 file, int8 activations", "llama.cpp, Q8_0"),
    ("Q8_0 file, float activations", "llama.cpp, Q8_0"),
    ("Q4_K_M file, int8 activations", "llama.cpp, Q4_K_M"),
    ("Q4_K_M file, float activations", "llama.cpp, Q4_K_M"),
    ("int8, head too", "OpenVINO, int8"),
    ("int4, int8 activations", "OpenVINO, int4"),
    (BFLOAT16, "vLLM, bfloat16"),
    (BFLOAT16, "llama.cpp, bfloat16"),
)
"""Which speeds the table compares: the first of a pair with the second."""


class Ratio(NamedTuple):
    """A ratio of speeds: the median of pairs, and a 95 % interval of their mean."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of the first to the second of each pair; there are at least two."""
    logs = [math.log(one / other) for one, other in pairs]
    quantile = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else _NORMAL
    reach = quantile * statistics.stdev(logs) / len(logs) ** 0.5
    middle = statistics.mean(logs)
    return Ratio(math.exp(statistics.median(logs)), math.exp(middle - reach), math.exp(middle + reach))


class Bench:
    """Runs engines in processes of their own.

    Args:
        options: Those of the command line.

    Attributes:
        rounds: The tokens per second of each round, by engine and workload.
        lines: What the engines' processes have printed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.rounds: list[dict[str, dict[str, float]]] = []
        self.lines: list[dict[str, Any]] = []

    def resume(self, found: Mapping[str, Any]) -> None:
        """Go on after the rounds of a file."""
        self.rounds, self.lines = found["rounds"], found["lines"]

    def run_round(self) -> None:
        """Run each engine once."""
        found: dict[str, dict[str, float]] = {}
        for name in self._options.engines:
            engine = ENGINES[name]
            found[name] = self._peer(engine) if isinstance(engine, str) else self._ours(engine)
            print(name, found[name] or "not prepared", sep=": ", file=sys.stderr, flush=True)
        self.rounds.append(found)

    def ratios(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the ratios by pair of engines and workload: those that at least two rounds have."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        measured = {name for each in self.rounds for name in each}
        for one, other in RATIOS:
            if one not in measured or other not in measured:
                continue
            row = {}
            for letter in "ABC":
                speeds = [(each.get(one, {}).get(letter), each.get(other, {}).get(letter)) for each in self.rounds]
                pairs = [(mine, theirs) for mine, theirs in speeds if mine and theirs]
                if len(pairs) > 1:
                    row[letter] = {"ratio": ratio_of(pairs)._asdict(), "pairs": pairs}
            found[f"{one} : {other}"] = row
        return found

    def _ours(self, engine: Ours) -> dict[str, float]:
        model = self._options.files / engine.file.replace("SIZE", self._options.size)
        if not model.exists():
            return {}
        command = [sys.executable, str(_HERE / "bench_peers.py"), "--model", str(model), "--dtype", engine.form.dtype]
        command += ["--workloads", self._options.workloads, "--workloads-dir", str(self._options.peers), "--runs", "1"]
        if engine.form.settings:
            command += ["--quantization-config", json.dumps(engine.form.settings)]
        text = _run(command, self._environment())
        return self._speeds(text, model=model.name, settings=dict(engine.form.settings))

    def _peer(self, row: str) -> dict[str, float]:
        """Return another engine's speeds; empty where it has not been prepared."""
        if not self._options.other_engines:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines"
            own = {"ONLY": f"^{row}$", "RUNS": "1", "WORKLOADS": self._options.workloads, "OUT": str(lines)}
            own |= {"SIZE": self._options.size, "BARS": str(self._options.files)}
            script = ["bash", str(self._options.peers / "compare_all.sh")]
            _run(script, self._environment() | own, is_checked=False)
            return self._speeds(lines.read_text() if lines.exists() else "", engine=row)

    def _speeds(self, text: str, **about: Any) -> dict[str, float]:
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        self.lines += [{**line, **about} for line in found]
        return {line["workload"]: line.get("decode_tok_s") or line["output_tok_s"] for line in found}

    def _environment(self) -> dict[str, str]:
        return os.environ | ({"BENCH_TINY": "1"} if self._options.tiny else {})


def _run(command: Sequence[str], environment: Mapping[str, str], is_checked: bool = True) -> str:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=is_checked)
    return done.stdout


def _make_model(options: argparse.Namespace) -> None:
    """Make the float checkpoint of the shape if there is none."""
    model = options.files / _FLOAT.replace("SIZE", options.size)
    if not (model / "config.json").exists():
        maker = options.peers.parent / "make_model.py"
        command = [sys.executable, str(maker), "--size", options.size, "--dtype", "bfloat16", "--out", str(model)]
        subprocess.run(command, check=True)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of what was measured."""
    machine, products = found["machine"], found["products"]
    lines = [
        f"{machine['cpu']}, load {machine['load']} at the start; shape {found['size']}, {len(found['rounds'])} rounds.",
        *([] if products is None else _product_lines(products)),
        "",
        "| speed, and the ratio | A decode | B | C |",
        "|---|---|---|---|",
    ]
    for name, row in found["ratios"].items():
        cells = (str(Ratio(**row[letter]["ratio"])) if letter in row else "-" for letter in "ABC")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| tokens per second, median | A decode | B | C |", "|---|---|---|---|"]
    for name in ENGINES:
        runs = [each[name] for each in found["rounds"] if name in each]
        if not runs:
            continue
        if not any(runs):
            lines.append(f"| {name} | not prepared: see prepare_peers.sh | | |")
            continue
        cells = (_median([run[letter] for run in runs if letter in run]) for letter in "ABC")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _product_lines(products: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"{products['instructions']}, {products['threads']} threads, {products['read_gb_s']} GB/s read, "
        f"{products['clock_ghz']} GHz.",
        "",
        "| weights | 1 row, cold: GB/s | share of the limit | 512 rows: GOP/s | : bfloat16 |",
        "|---|---|---|---|---|",
    ]
    for name, row in products["forms"].items():
        cells = (row["cold_gb_s"], row["cold_share"], row["gop_s_512"], row["times_bf16_512"])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return lines


def _median(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):.1f}" if speeds else "-"


def _products(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(_HERE / "quantized_products.py"), "--megabytes", str(options.megabytes)]
    command += ["--outer", str(options.outer), "--inner", str(options.inner), "--turns", str(options.rounds)]
    return json.loads(_run(command, os.environ))


def _machine() -> dict[str, str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    load = Path("/proc/loadavg").read_text().split()
    return {"cpu": names[0].partition(":")[2].strip() if names else "unknown", "load": " ".join(load[:3])}


def main(arguments: list[str] | None = None) -> None:
    """Measure everything, and write one JSON file and one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", help="a shape of make_model.py (default: %(default)s)")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--workloads", default="ABC")
    parser.add_argument("--rounds", type=int, default=3, help="of all engines, 2 or more (default: %(default)s)")
    parser.add_argument("--no-products", dest="products", action="store_false", help="engines alone")
    parser.add_argument("--megabytes", type=int, default=512, help="of weights of cold products")
    parser.add_argument("--outer", type=int, default=8192, help="outputs of the products (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2048, help="features of the products (default: %(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="add the rounds to those of the JSON file, if it is there"
    )
    parser.add_argument("--tiny", action="store_true", help="few tokens, to try the script: speeds mean nothing")
    parser.add_argument("--no-other-engines", dest="other_engines", action="store_false")
    parser.add_argument("--peers", type=Path, default=_HERE.parents[1] / "shared" / "bench" / "peers")
    parser.add_argument("--files", type=Path, default=Path.home() / ".cache" / "jaxserve-bars", help="models")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--markdown", type=Path, required=True, help="the table")
    options = parser.parse_args(arguments)
    if options.rounds < (1 if options.resume else 2):
        parser.error("--rounds: expected 2 or more, of which an interval can be computed")
    bench = Bench(options)
    _make_model(options)
    if options.resume and options.out.exists():
        found = json.loads(options.out.read_text())
        if found["size"] != options.size:
            parser.error(f"--resume: {options.out} has the shape {found['size']}, got --size {options.size}")
        bench.resume(found)
    else:
        products = _products(options) if options.products else None
        found = {"size": options.size, "machine": _machine(), "products": products}
    for _ in range(options.rounds):
        bench.run_round()
        found |= {"ratios": bench.ratios(), "rounds": bench.rounds, "lines": bench.lines}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.markdown.write_text(markdown(found))
    print(options.markdown.read_text(), end="")


if __name__ == "__main__":
    main()
