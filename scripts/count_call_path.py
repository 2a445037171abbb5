"""Count what a warm request executes of the project, in all processes: from the entry to the device, and back.

    python scripts/count_call_path.py                    one JSON line for each scenario
    python scripts/count_call_path.py --only chat        scenarios whose name contains this
    python scripts/count_call_path.py --list             the functions and the classes as well
    python scripts/count_call_path.py --root OTHER       the same scenarios on another checkout

Scenarios: ``generate`` (``LLM.generate`` of one greedy prompt of 4 tokens), ``stop`` (the same with ``n=2`` and a stop
string) and ``chat`` (one streamed chat completion over HTTP). Each request runs twice before it counts.

Counted are distinct lines, and distinct statements of the syntax tree of which a line was executed: longer lines or
further functions change nothing, only work that is no longer done does. On Python 3.12 and newer ``sys.monitoring``
also tells which classes of the project were called; on 3.11 ``sys.settrace`` does not.
"""

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from scripts.path_tracer.scenarios import OFF, SCENARIOS  # noqa: E402  (after the path that it lies on)

_PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
_TRACER = _ROOT / "scripts" / "path_tracer"


def trace(scenario: str, root: Path) -> list[dict[str, Any]]:
    """Run a scenario on a checkout; return what each of its processes executed.

    Raises:
        subprocess.CalledProcessError: The scenario failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "switch"
        switch.write_bytes(OFF)
        settings = {"folder": folder, "root": str(root), "packages": _PACKAGES}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_TRACER), str(root)]),
            "PYTHON_PATH_TRACE": json.dumps(settings),  # a name that processes with a clean environment keep
        }
        command = [sys.executable, str(_TRACER / "scenarios.py"), scenario, str(switch)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
        return [json.loads(each.read_text()) for each in sorted(Path(folder).glob("*.json"))]


def count(notes: list[dict[str, Any]], root: Path) -> dict[str, Any]:
    """Return the numbers of processes, files, functions, lines, statements and classes, and the lines of each file."""
    lines: dict[str, set[int]] = collections.defaultdict(set)
    for note in notes:
        for path, line in note["lines"]:
            lines[path].add(line)
    functions = {tuple(each) for note in notes for each in note["functions"]}
    classes = {each for note in notes for each in note["classes"]}
    statements = {path: executed_statements(Path(path).read_text(), found) for path, found in lines.items()}
    by_file = {
        str(Path(path).relative_to(root)): {"lines": len(found), "statements": statements[path]}
        for path, found in sorted(lines.items())
    }
    return {
        "processes": sum(bool(note["lines"]) for note in notes),
        "files": len(lines),
        "functions": sum("<" not in name.rpartition(".")[2] for _, _, name in functions),
        "lines": sum(map(len, lines.values())),
        "statements": sum(statements.values()),
        "classes": len(classes),
        "by_file": by_file,
    }


def executed_statements(text: str, lines: set[int]) -> int:
    """Return the number of statements of a source text of which a line is among ``lines``.

    Of a statement with a body, such as ``if`` or ``def``, only the lines before the body are its own.
    """
    return sum(bool(own & lines) for own in _own_lines(ast.parse(text)))


def _own_lines(tree: ast.AST) -> Iterator[set[int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for child in ast.walk(node):
            if child is not node and isinstance(child, ast.stmt):
                own -= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
        yield own


def _show(notes: list[dict[str, Any]], root: Path) -> None:
    functions: Mapping[tuple[str, int], str] = {
        (path, line): name for note in notes for path, line, name in note["functions"]
    }
    for (path, line), name in sorted(functions.items()):
        print(f"{Path(path).relative_to(root)}:{line} {name}")
    for name in sorted({each for note in notes for each in note["classes"]}):
        print(f"class {name}")


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains this")
    parser.add_argument("--list", action="store_true", help="name the functions and the classes")
    parser.add_argument("--root", type=Path, default=_ROOT, help="checkout to measure (default: this one)")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    for scenario in (name for name in SCENARIOS if arguments.only in name):
        begin = time.monotonic()
        notes = trace(scenario, root)
        if arguments.list:
            _show(notes, root)
        found = count(notes, root)
        print(json.dumps({"scenario": scenario, "seconds": round(time.monotonic() - begin, 1), **found}), flush=True)


if __name__ == "__main__":
    main()
