"""Report how the code is cut: files, lines, functions, and the pieces that may be too long or too small.

    python scripts/report_sizes.py            one JSON line per package
    python scripts/report_sizes.py --list     also the longest files and functions, and private functions used once

The numbers are for a reviewer to look at; ``tests/test_style.py`` only limits extremes.
Generated files (``*_pb2*``) are left out.
"""

import argparse
import ast
import collections
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_LONG_FILE_LINES = 250
_SHORT_FILE_LINES = 60
_LONG_FUNCTION_LINES = 60
_PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints", "scripts")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


@cache
def syntax_nodes(path: Path) -> list[ast.AST]:
    """Return every node of the parsed file."""
    return list(ast.walk(syntax_tree(path)))


def source_files(*folders: str) -> list[Path]:
    """Return the handwritten Python files under folders of the repository, in a fixed order."""
    found = sorted(path for folder in folders for path in (_ROOT / folder).rglob("*.py"))
    return [path for path in found if not re.search(r"_pb2(_grpc)?\.py$", path.name)]


def functions(path: Path) -> Iterator[Function]:
    """Yield the functions and methods of a file, nested ones included."""
    for node in syntax_nodes(path):
        if isinstance(node, Function):
            yield node


def num_lines(node: ast.stmt) -> int:
    """Return how many lines a statement spans, the first and the last included."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def single_use_functions(files: list[Path]) -> list[str]:
    """Return the private functions and methods whose name occurs once besides their definition, as ``path: name``."""
    uses: collections.Counter[str] = collections.Counter()
    for path in files:
        uses.update(re.findall(r"\b_[a-z]\w*", path.read_text()))
    return [
        f"{path.relative_to(_ROOT)}: {node.name}"
        for path in files
        for node in functions(path)
        if re.match(r"_[a-z]", node.name) and uses[node.name] == 2
    ]


def importers(files: list[Path]) -> dict[str, set[Path]]:
    """Return the files that import each module, by the module's dotted name."""
    found: dict[str, set[Path]] = collections.defaultdict(set)
    for path in files:
        for node in syntax_nodes(path):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(path)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found[node.module].add(path)
                for alias in node.names:
                    found[f"{node.module}.{alias.name}"].add(path)
    return found


def module_name(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_report(name: str, imported_by: dict[str, set[Path]]) -> dict[str, object]:
    """Return the numbers of one package (a folder relative to the repository root), given who imports each module."""
    files = source_files(name)
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    nodes = [node for path in files for node in functions(path)]
    spans = sorted(num_lines(node) for node in nodes)
    return {
        "package": name,
        "files": len(files),
        "lines": sum(lengths.values()),
        f"files_under_{_SHORT_FILE_LINES}": sum(0 < length < _SHORT_FILE_LINES for length in lengths.values()),
        f"files_over_{_LONG_FILE_LINES}": sum(length > _LONG_FILE_LINES for length in lengths.values()),
        "files_with_one_importer": sum(len(imported_by.get(module_name(path), ())) == 1 for path in files),
        "functions": len(spans),
        "private_functions": sum(bool(re.match(r"_[a-z]", node.name)) for node in nodes),
        "private_used_once": len(single_use_functions(files)),
        "function_lines_p90": spans[len(spans) * 9 // 10] if spans else 0,
        f"functions_over_{_LONG_FUNCTION_LINES}": sum(span > _LONG_FUNCTION_LINES for span in spans),
    }


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", action="store_true", help="also list long files and functions and single-use functions"
    )
    arguments = parser.parse_args()
    everything = source_files(*_PACKAGES)
    imported_by = importers(everything)
    rooms = sorted(path.parent.name for path in (_ROOT / "jaxserve").glob("*/__init__.py"))
    for name in (*_PACKAGES, *(f"jaxserve/{room}" for room in rooms)):
        print(json.dumps(package_report(name, imported_by)))
    if arguments.list:
        for path in everything:
            length = len(path.read_text().splitlines())
            if length > _LONG_FILE_LINES:
                print(f"{path.relative_to(_ROOT)}: {length} lines")
            for node in functions(path):
                if num_lines(node) > _LONG_FUNCTION_LINES:
                    print(f"{path.relative_to(_ROOT)}:{node.lineno}: {node.name} has {num_lines(node)} lines")
        print("\n".join(single_use_functions(everything)))


if __name__ == "__main__":
    main()
