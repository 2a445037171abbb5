"""Measures quantized weights in one run: products, our forms against our bfloat16, and other engines on the same files.

    python scripts/bench_quantized.py --size 1b --out table.json --markdown table.md
    python scripts/bench_quantized.py --size 15m --tiny --pairs 2 --megabytes 4 --out t.json --markdown t.md

Engines take turns: each pair runs bfloat16 (or the other engine) and the form one after the other, each in a process of
its own, with the workloads of ``../shared/bench/peers`` (A is one stream, B and C have 32 requests). A ratio is the
median of the pairs', with the 95 % interval of their logarithms' mean. Other engines run by ``compare_all.sh`` there,
where they have been prepared (``prepare_peers.sh``); what is missing is named. Run it on a machine without other work:
the table says the load that it began with.
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


FORMS: Mapping[str, Form] = {
    "int8": Form({"linear": "int8_w8a8"}),
    "int8, head too": Form({"linear": "int8_w8a8", "head": "int8_w8a8"}),
    "int4, float activations": Form(_INT4),
    "int4, int8 activations": Form({**_INT4, "activations": "int8"}),
}
"""Compared with our bfloat16, on a float checkpoint."""


class Peer(NamedTuple):
    """Another engine and a file that we load too.

    Attributes:
        row: Its name in ``compare_all.sh``.
        file: Our model, relative to the folder of the peers' files; ``SIZE`` stands for the shape.
        form: How we compute with it.
    """

    row: str
    file: str
    form: Form


PEERS: Sequence[Peer] = (
    Peer("vllm w8a8", "SIZE-w8a8", Form({})),
    Peer("llama.cpp q8_0", "gguf/SIZE-q8_0.gguf", Form({"activations": "int8"})),
    Peer("llama.cpp q8_0", "gguf/SIZE-q8_0.gguf", Form({})),
    Peer("llama.cpp q4_k_m", "gguf/SIZE-q4_k_m.gguf", Form({"activations": "int8"})),
    Peer("llama.cpp q4_k_m", "gguf/SIZE-q4_k_m.gguf", Form({})),
    Peer("openvino int8 weights", "SIZE-bf16", FORMS["int8, head too"]),
    Peer("openvino int4 weights", "SIZE-bf16", FORMS["int4, int8 activations"]),
)


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
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.lines: list[dict[str, Any]] = []

    def ours(self, model: Path, form: Form, letters: str) -> dict[str, float]:
        """Return our tokens per second by workload."""
        command = [sys.executable, str(_HERE / "bench_peers.py"), "--model", str(model), "--dtype", form.dtype]
        command += ["--workloads", letters, "--workloads-dir", str(self._options.peers), "--runs", "1"]
        command += ["--quantization-config", json.dumps(form.settings)] if form.settings else []
        return self._speeds(_run(command, self._environment()), model=model.name, settings=dict(form.settings))

    def peer(self, row: str, letters: str) -> dict[str, float]:
        """Return another engine's tokens per second by workload; empty where it has not been prepared."""
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines"
            own = {"ONLY": f"^{row}$", "RUNS": "1", "WORKLOADS": letters, "OUT": str(lines), "SIZE": self._options.size}
            _run(["bash", str(self._options.peers / "compare_all.sh")], self._environment() | own, is_checked=False)
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


def _model(options: argparse.Namespace) -> Path:
    """Return a float checkpoint of the shape, which is made if there is none."""
    model = options.files / f"{options.size}-bf16"
    if not (model / "config.json").exists():
        maker = options.peers.parent / "make_model.py"
        command = [sys.executable, str(maker), "--size", options.size, "--dtype", "bfloat16", "--out", str(model)]
        subprocess.run(command, check=True)
    return model


def _compare_forms(bench: Bench, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in options.forms:
        pairs: dict[str, list[tuple[float, float]]] = {letter: [] for letter in options.workloads}
        for _ in range(options.pairs):
            one, other = (bench.ours(model, form, options.workloads) for form in (FORMS[name], Form({})))
            for letter, taken in pairs.items():
                taken.append((one[letter], other[letter]))
        found[name] = _rows(pairs)
        _say(f"{name} : bfloat16", found[name])
    return found


def _compare_peers(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for peer in PEERS if options.other_engines else ():
        model = options.files / peer.file.replace("SIZE", options.size)
        name = f"{peer.row}: ours with {json.dumps(peer.form.settings) if peer.form.settings else 'the file as it is'}"
        if not model.exists():
            found[name] = f"no {model}"
            continue
        pairs: dict[str, list[tuple[float, float]]] = {letter: [] for letter in options.workloads}
        for _ in range(options.pairs):
            theirs = bench.peer(peer.row, options.workloads)
            if not theirs:
                break
            mine = bench.ours(model, peer.form, options.workloads)
            for letter, speed in theirs.items():
                pairs[letter].append((mine[letter], speed))
        rows = _rows(pairs)
        found[name] = rows or "not prepared: see prepare_peers.sh"
        _say(name, rows)
    return found


def _rows(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    return {
        letter: {"ratio": ratio_of(taken)._asdict(), "pairs": [list(each) for each in taken]}
        for letter, taken in pairs.items()
        if len(taken) > 1
    }


def _say(name: str, rows: Mapping[str, Any]) -> None:
    texts = (f"{letter} {Ratio(**row['ratio'])}" for letter, row in rows.items())
    print(name, *texts, sep=": ", file=sys.stderr, flush=True)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of what was measured."""
    products, machine = found["products"], found["machine"]
    lines = [
        f"{machine['cpu']}, {products['instructions']}, {products['threads']} threads, "
        f"{products['read_gb_s']} GB/s read, {products['clock_ghz']} GHz, load {machine['load']} at the start; "
        f"shape {found['size']}, {found['pairs']} pairs.",
        "",
        "| weights | 1 row, cold: GB/s | share of the limit | 512 rows: GOP/s | : bfloat16 |",
        "|---|---|---|---|---|",
    ]
    for name, row in products["forms"].items():
        cells = (row["cold_gb_s"], row["cold_share"], row["gop_s_512"], row["times_bf16_512"])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    for title, section in (("ours : our bfloat16", "forms"), ("ours : theirs", "peers")):
        lines += ["", f"| {title} | A decode | B | C |", "|---|---|---|---|"]
        for name, rows in found[section].items():
            if isinstance(rows, str):
                lines.append(f"| {name} | {rows} | | |")
                continue
            cells = (str(Ratio(**rows[letter]["ratio"])) if letter in rows else "-" for letter in "ABC")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _machine() -> dict[str, str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    load = Path("/proc/loadavg").read_text().split()
    return {"cpu": names[0].partition(":")[2].strip() if names else "unknown", "load": " ".join(load[:3])}


def main(arguments: list[str] | None = None) -> None:
    """Measure everything, and write one JSON file and one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", help="a shape of make_model.py (default: %(default)s)")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS), metavar="FORM")
    parser.add_argument("--workloads", default="ABC")
    parser.add_argument("--pairs", type=int, default=5, help="of each comparison, 2 or more (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=512, help="of weights of cold products")
    parser.add_argument("--outer", type=int, default=8192, help="outputs of the products (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2048, help="features of the products (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="few tokens, to try the script: speeds mean nothing")
    parser.add_argument("--no-other-engines", dest="other_engines", action="store_false")
    parser.add_argument("--peers", type=Path, default=_HERE.parents[1] / "shared" / "bench" / "peers")
    parser.add_argument("--files", type=Path, default=Path.home() / ".cache" / "jaxserve-bars", help="models")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--markdown", type=Path, required=True, help="the table")
    options = parser.parse_args(arguments)
    if options.pairs < 2:
        parser.error("--pairs: expected 2 or more, of which an interval can be computed")
    machine, bench = _machine(), Bench(options)
    command = [sys.executable, str(_HERE / "quantized_products.py"), "--megabytes", str(options.megabytes)]
    command += ["--outer", str(options.outer), "--inner", str(options.inner), "--turns", str(options.pairs)]
    products = json.loads(_run(command, os.environ))
    forms = _compare_forms(bench, _model(options), options)
    found = {"size": options.size, "pairs": options.pairs, "machine": machine, "products": products, "forms": forms}
    found |= {"peers": _compare_peers(bench, options), "lines": bench.lines}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.markdown.write_text(markdown(found))
    print(options.markdown.read_text(), end="")


if __name__ == "__main__":
    main()
