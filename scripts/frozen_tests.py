"""Check that the frozen tests have not changed, and that they reach the project as its users do.

    python scripts/frozen_tests.py                      compare with tests/frozen.json
    python scripts/frozen_tests.py --write [FILE ...]   write tests/frozen.json: for the commit that freezes files

A frozen file may change its path, its import lines, its ``slow`` marks and the scopes of its fixtures. Everything else
counts but comments and layout: the script hashes the rest of the syntax tree. From the project such a file imports the
names that ``jaxserve`` exports, ``jaxserve.client``, the generated protos, ``scripts.server_child``, other frozen
files and the helpers in ``HELPERS``; whatever else it needs has a name in ``tests/hooks.py``.
"""

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = "tests/frozen.json"
PACKAGES = frozenset(("jaxserve", "pallas_kernels", "sharding", "checkpoints", "scripts", "tests"))
HELPERS = frozenset(
    (
        "jaxserve.client",
        "scripts.server_child",
        "tests.certificates",
        "tests.faults.random_requests",
        "tests.hooks",
        "tests.server_process",
    )
)
"""Modules that a frozen file may import."""
RULE = "a frozen file may change only its path, imports, slow marks and fixtures' scopes"
# They differ from one version of Python to the next, or say nothing.
_SKIPPED_FIELDS = frozenset(("ctx", "kind", "type_comment", "type_ignores"))


class Report(NamedTuple):
    """The result of a check.

    Attributes:
        errors: Messages, each of which starts with a path.
        moved: The new path of each file that has moved.
    """

    errors: list[str]
    moved: dict[str, str]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check the frozen files of a repository, or write their table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE} in place of comparing with it")
    parser.add_argument("files", nargs="*", help="with --write: the files to freeze; default: those in the table")
    options = parser.parse_args(arguments)
    if options.files and not options.write:
        parser.error("files are for --write; a check reads all files in the table")
    table: dict[str, str] = json.loads((root / TABLE).read_text()) if (root / TABLE).exists() else {}
    if options.write:
        paths = sorted(options.files or (place or path for path, place in find(table, root).items()))
        table = {path: digest((root / path).read_text()) for path in paths}
        (root / TABLE).write_text(json.dumps(table, indent=1) + "\n")
    report = check(table, root)
    for path, place in report.moved.items():
        print(f"{path}: moved to {place}")
    for error in report.errors:
        print(error)
    print(f"{len(table)} frozen files, {len(report.errors)} errors")
    return 1 if report.errors else 0


def check(table: Mapping[str, str], root: Path) -> Report:
    """Compare the frozen files of a repository with their hashes, and check what they import."""
    places = find(table, root)
    errors = []
    for path, place in places.items():
        if place is None:
            state = "changed" if (root / path).exists() else "missing, and no file under tests/ has its content"
            errors.append(f"{path}: {state}; {RULE}")
    present = [place for place in places.values() if place is not None]
    allowed = HELPERS | {module_name(place) for place in present}
    exported = exported_names(root)
    for place in present:
        for line, names in inner_imports((root / place).read_text(), allowed, exported):
            errors.append(f"{place}:{line}: a frozen file cannot import {names}; use a name of tests/hooks.py")
    return Report(errors, {path: place for path, place in places.items() if place is not None and place != path})


def find(table: Mapping[str, str], root: Path) -> dict[str, str | None]:
    """Return where each frozen file is now: a path from the root, or None if no file has its hash."""
    found = {path: path if _hash(root / path) == expected else None for path, expected in table.items()}
    lost = {table[path]: path for path, place in found.items() if place is None}
    if lost:
        for file in sorted((root / "tests").rglob("*.py")):
            path = lost.get(_hash(file) or "")
            # pytest collects files by their names
            if path is not None and file.name.startswith("test_") == Path(path).name.startswith("test_"):
                found[path] = file.relative_to(root).as_posix()
    return found


def _hash(file: Path) -> str | None:
    return digest(file.read_text()) if file.exists() else None


def digest(source: str) -> str:
    """Return the hash of a file's syntax tree without imports, ``slow`` marks and scopes of fixtures."""
    tree = ast.parse(source)
    slow_names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node.value) and is_slow(node.value, frozenset())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    remover = _Remover(frozenset(slow_names - {"pytestmark"}))
    tree = _without_unused(remover.visit(tree), remover.names)
    return hashlib.sha256(_text(tree).encode()).hexdigest()


def is_slow(node: ast.expr, names: frozenset[str]) -> bool:
    """Return whether an expression is the mark ``slow``, or a list of nothing else.

    Args:
        node: The expression.
        names: Names of the file that stand for the mark.
    """
    match node:
        case ast.Attribute(attr="slow", value=ast.Attribute(attr="mark")):
            return True
        case ast.Call(func=function):
            return is_slow(function, names)
        case ast.Name(id=name):
            return name in names
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return all(is_slow(each, names) for each in elements)
        case ast.IfExp(body=one, orelse=other):
            return is_slow(one, names) and is_slow(other, names)
    return False


def _is_of_pytest(node: ast.expr, name: str) -> bool:
    """Return whether an expression is ``pytest.name``."""
    match node:
        case ast.Attribute(attr=attribute, value=ast.Name(id="pytest")):
            return attribute == name
    return False


class _Remover(ast.NodeTransformer):
    """Removes what a frozen file may change.

    Attributes:
        names: Names that the removed marks use.

    Args:
        slow_names: Names of the file that stand for the mark ``slow``.
    """

    def __init__(self, slow_names: frozenset[str]):
        self._slow_names = slow_names
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        """Remove it."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove it."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Remove the mark from the decorators."""
        node.decorator_list = self._kept(node.decorator_list)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Remove the mark from the decorators."""
        node.decorator_list = self._kept(node.decorator_list)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Remove the mark from ``pytestmark``."""
        if [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            marks = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            kept = self._kept(marks)
            if not kept:
                return None
            node.value = kept[0] if len(kept) == 1 else ast.List(kept)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Remove the mark from ``pytest.param``, which is then the values alone, and the scope from a fixture."""
        if _is_of_pytest(node.func, "param"):
            node.keywords = [keyword for keyword in map(self._without_mark, node.keywords) if keyword is not None]
            if not node.keywords:
                is_value = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
                return self.visit(node.args[0] if is_value else ast.Tuple(node.args))
        elif _is_of_pytest(node.func, "fixture"):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "scope"]
            if not node.keywords and not node.args:
                return self.visit(node.func)
        return self.generic_visit(node)

    def _without_mark(self, keyword: ast.keyword) -> ast.keyword | None:
        if keyword.arg != "marks":
            return keyword
        kept = self._kept(keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value])
        if not kept:
            return None
        return ast.keyword("marks", kept[0] if len(kept) == 1 else ast.List(kept))

    def _kept(self, marks: Sequence[ast.expr]) -> list[ast.expr]:
        """Return the marks but ``slow``, and note the names that the latter uses."""
        kept = []
        for mark in marks:
            if is_slow(mark, self._slow_names):
                self.names |= {node.id for node in ast.walk(mark) if isinstance(node, ast.Name)}
            else:
                kept.append(mark)
        return kept


def _without_unused(tree: ast.Module, names: set[str]) -> ast.Module:
    """Remove the assignments, with their docstrings, of names that nothing but the removed marks uses."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    kept: list[ast.stmt] = []
    is_removed = False
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        targets = {ast.unparse(target) for target in node.targets} if isinstance(node, ast.Assign) else set[str]()
        is_removed = is_removed if is_docstring else bool(targets) and targets <= names - used
        if not is_removed:
            kept.append(node)
    tree.body = kept
    return tree


def _text(node: object) -> str:
    """Return a syntax tree as text, the same from every version of Python."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _SKIPPED_FIELDS]
        values = [f"{name}={_text(value)}" for name, value in fields if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(values)})"
    return f"[{', '.join(map(_text, node))}]" if isinstance(node, list) else ascii(node)


def exported_names(root: Path) -> frozenset[str]:
    """Return the names that ``jaxserve`` exports, without importing it."""
    for node in ast.parse((root / "jaxserve/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value))
    raise ValueError("jaxserve/__init__.py has no __all__")


def module_name(path: str) -> str:
    """Return the name of the module in a file: ``tests.faults.talk`` for ``tests/faults/talk.py``."""
    return path.removesuffix(".py").replace("/", ".")


def inner_imports(source: str, allowed: frozenset[str], exported: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the names of every import from this project that a frozen file must not have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module in allowed else [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        inner = [name for name in names if name not in allowed and _is_inner(name, exported)]
        if inner:
            yield node.lineno, ", ".join(inner)


def _is_inner(name: str, exported: frozenset[str]) -> bool:
    """Return whether a dotted name is this project's, and neither a proto nor a name that ``jaxserve`` exports."""
    package, _, rest = name.partition(".")
    if package == "jaxserve" and (not rest or rest in exported or name.endswith(("_pb2", "_pb2_grpc"))):
        return False
    return package in PACKAGES


if __name__ == "__main__":
    sys.exit(main())
