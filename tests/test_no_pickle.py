"""Nothing is ever unpickled: what would do so is not even imported."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FORBIDDEN_MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"),
    *("jsonpickle", "torch", "concurrent.futures.process"),
}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "serialize_executable", "deserialize_and_load"}


def product_files() -> list[Path]:
    """Python files of what is shipped."""
    return [
        path
        for name in ("jaxserve", "checkpoints", "sharding", "pallas_kernels")
        for path in (REPOSITORY / name).rglob("*.py")
    ]


def breaches(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and names of what may not be there."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, name) for name in names if {name, name.partition(".")[0]} & FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            is_bare = isinstance(node.func, ast.Name)
            if (name in FORBIDDEN_CALLS and (is_bare or name not in ("eval", "exec"))) or any(
                keyword.arg == "allow_pickle" and not _is_false(keyword.value) for keyword in node.keywords
            ):
                found.append((node.lineno, name))
    return found


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "eval('1')",
        "import torch",
    ],
)
def test_the_lint_sees(source: str) -> None:
    assert breaches(ast.parse(source))


def test_nothing_unpickles() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in product_files()
        for line, name in breaches(ast.parse(path.read_text()))
    ]
    assert found == []
