"""Counts the functions between ``LLM.generate`` and the device: the engine's main path.

    python scripts/count_call_path.py            one JSON line: functions and lines, in all and by file
    python scripts/count_call_path.py --list     the functions themselves as well

The demo model answers two prompts once to compile everything, then once more while every Python function of the project
that is entered, on any thread, is noted. Lines are those of the functions' sources, without docstrings and blank lines.
"""

import argparse
import ast
import collections
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import jaxserve

_ROOT = Path(jaxserve.__file__).resolve().parent.parent
_PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
_PROMPTS = ["1+1=", "2+3="]


def entered_functions() -> set[CodeType]:
    """Return the project's functions that run while the demo model answers."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code)

    params = jaxserve.SamplingParams(temperature=0.0, max_tokens=8)
    threading.setprofile(note)  # the engine's threads start with it
    with jaxserve.LLM("demo") as llm:
        llm.generate(_PROMPTS, params)
        found.clear()
        sys.setprofile(note)
        llm.generate(_PROMPTS, params)
        sys.setprofile(None)
        answered = set(found)
    threading.setprofile(None)
    return {code for code in answered if _place(code) is not None}


def _place(code: CodeType) -> Path | None:
    """Return the file of a function of the project, relative to its root; None for anything else."""
    path = Path(code.co_filename)
    if not path.is_relative_to(_ROOT) or path.relative_to(_ROOT).parts[0] not in _PACKAGES or "<" in code.co_name:
        return None
    return path.relative_to(_ROOT)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _lines_by_start(path: Path) -> dict[int, int]:
    """Return the lines of each function of a file without docstring and blank lines, by its first line."""
    text = (_ROOT / path).read_text()
    source = text.splitlines()
    found = {}
    for node in _functions(ast.parse(text)):
        rows = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if ast.get_docstring(node) is not None:
            rows -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found[first] = sum(bool(source[row - 1].strip()) for row in rows)
    return found


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    by_file: dict[Path, dict[int, str]] = collections.defaultdict(dict)
    for code in entered_functions():
        path = _place(code)
        assert path is not None
        by_file[path][code.co_firstlineno] = code.co_qualname
    files = {}
    for path, functions in sorted(by_file.items()):
        lines = _lines_by_start(path)
        counted = {start: name for start, name in functions.items() if start in lines}
        files[str(path)] = {"functions": len(counted), "lines": sum(lines[start] for start in counted)}
        if arguments.list:
            for start, name in sorted(counted.items()):
                print(f"{path}:{start} {name} {lines[start]}")
    totals = {unit: sum(each[unit] for each in files.values()) for unit in ("functions", "lines")}
    print(json.dumps({"files": len(files), **totals, "by_file": files}))


if __name__ == "__main__":
    main()
