"""The rules of the project that a script can hold: each test lists every breach as `path:line: what`."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import report_sizes
from scripts.report_sizes import Function, num_lines, syntax_nodes, syntax_tree
from scripts.report_sizes import source_files as python_files

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
TEXT_SUFFIXES = {".py", ".sh", ".toml", ".md", ".txt", ".yml", ".yaml", ".cfg", ".ini", ".proto"}

# A hard stop, not a target: scripts/report_sizes.py lists what is long or in too many pieces, for reviewers to judge.
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120
MAX_FILE_LINES = 400
MIN_DUPLICATE_LINES = 10

# Heavy imports that may wait for the function that needs them.
LAZY_IMPORTS = {
    "transformers",
    "torch",
    "orbax",
    "tensorstore",
    "sentencepiece",
    "tokenizers",
    "huggingface_hub",
    "uvicorn",
    "ray",
}
# Where modules of ours may be imported inside a function: lazy re-exports, tables of names, the command's start-up.
LAZY_FILES = re.compile(r"__init__\.py|registry\.py|cli\.py")
TO_DO = re.compile(r"\b(TODO|FIXME|XXX)\b")


def nodes(*folders: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every syntax node of every Python file under the folders, with its file."""
    for path in python_files(*folders):
        for node in syntax_nodes(path):
            yield path, node


def functions(*folders: str) -> Iterator[tuple[Path, Function]]:
    """Every function, method and nested function under the folders, with its file."""
    for path in python_files(*folders):
        for node in report_sizes.functions(path):
            yield path, node


def public_definitions(path: Path) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Public functions and classes of a module and public methods of those classes, with dotted names."""
    for node in syntax_tree(path).body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def place(path: Path, line: int) -> str:
    """`path:line` relative to the repository root."""
    return f"{path.relative_to(REPOSITORY)}:{line}"


def called_name(node: ast.expr) -> str:
    """The last part of the name in a call or a base class: `P` for both `P(...)` and `sharding.P(...)`."""
    if isinstance(node, ast.Subscript):
        return called_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def imported_modules(node: ast.AST) -> list[str]:
    """Modules that an import statement names; empty for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def assert_none(breaches: list[str]) -> None:
    """Fails with one line a breach."""
    assert not breaches, "\n" + "\n".join(breaches)


def test_the_packages_are_seen() -> None:
    """Every other test here passes on an empty list: the walk must find the code."""
    for package in PACKAGES:
        assert python_files(package), f"no Python file under {package}/"


def test_no_global_statements() -> None:
    assert_none([place(p, n.lineno) for p, n in nodes(*PACKAGES, "scripts", "tests") if isinstance(n, ast.Global)])


def test_only_the_scheduler_changes_sequences() -> None:
    """``Sequence`` itself, the scheduler, and its parts: tokens that are appended, drafts, pages, order."""
    parts = {"context_cache.py", "context_pages.py", "context_states.py", "draft_states.py", "drafts.py"}
    parts |= {"microbatches.py", "queues.py"}
    owners = {"scheduler.py", "sequence.py", *parts}
    fields = {
        node.target.id
        for node in ast.walk(syntax_tree(REPOSITORY / "jaxserve/scheduling/sequence.py"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {"token_ids", "finish_reason", "num_released"} <= fields
    assert_none(
        [
            place(path, target.lineno)
            for path, node in nodes("jaxserve")
            if path.name not in owners
            for target in changed_attributes(node)
            if target.attr in fields and re.search(r"(^|[._])(sequence|follower|table)$", ast.unparse(target.value))
        ]
    )


def changed_attributes(node: ast.AST) -> list[ast.Attribute]:
    """Attributes that a statement assigns, or whose list a call changes: ``x.y`` of ``x.y = 1``, ``x.y.pop()``."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        found = [one for target in node.targets for one in getattr(target, "elts", [target])]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"append", "extend", "insert", "pop", "remove", "clear"}:
            found = [node.func.value]
    return [target for target in found if isinstance(target, ast.Attribute)]


def test_no_hasattr() -> None:
    calls = ((path, node) for path, node in nodes(*PACKAGES, "scripts", "tests") if isinstance(node, ast.Call))
    assert_none([place(path, node.lineno) for path, node in calls if called_name(node.func) == "hasattr"])


def is_kernel(path: Path) -> bool:
    """Whether a file may have functions as long as kernels are."""
    return path.is_relative_to(REPOSITORY / "pallas_kernels")


def test_functions_are_short() -> None:
    assert_none(
        [
            f"{place(path, node.lineno)}: {node.name} has {num_lines(node)} lines"
            for path, node in functions(*PACKAGES, "scripts")
            if num_lines(node) > (MAX_KERNEL_LINES if is_kernel(path) else MAX_FUNCTION_LINES)
        ]
    )


def test_files_are_short() -> None:
    breaches = []
    for path in python_files(*PACKAGES, "scripts"):
        length = len(path.read_text().splitlines())
        if length > MAX_FILE_LINES:
            breaches.append(f"{place(path, 1)}: {length} lines")
    assert_none(breaches)


def test_partition_specs_are_made_in_sharding_only() -> None:
    breaches = []
    for path in python_files("jaxserve", "pallas_kernels", "checkpoints", "scripts"):
        aliases = {"PartitionSpec"}
        for node in syntax_nodes(path):
            if isinstance(node, ast.ImportFrom):
                aliases |= {alias.asname for alias in node.names if alias.name == "PartitionSpec" and alias.asname}
        for node in syntax_nodes(path):
            if isinstance(node, ast.Call) and called_name(node.func) in aliases:
                breaches.append(place(path, node.lineno))
    assert_none(breaches)


def test_arrays_are_put_on_devices_where_some_may_be_elsewhere() -> None:
    """Elsewhere ``device_put`` and ``jax.devices`` assume that one process has all devices: ``sharding`` has others."""
    breaches = []
    for path in python_files("jaxserve", "checkpoints"):
        if path.name == "loader.py" or "lab" in path.parts:  # experiments of one process
            continue
        for node in syntax_nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jax.device_put", "device_put", "jax.devices"):
                breaches.append(place(path, node.lineno))
    assert_none(breaches)


def test_no_torch_outside_tests() -> None:
    breaches = []
    for path, node in nodes(*PACKAGES, "scripts"):
        if any(name.split(".")[0] == "torch" for name in imported_modules(node)):
            breaches.append(place(path, getattr(node, "lineno", 1)))
    assert_none(breaches)


def test_tests_skip_where_torch_is_absent() -> None:
    """The dev extra has torch on one Python only: `torch = pytest.importorskip("torch")` skips, an import fails."""
    breaches = []
    for path in python_files("tests"):
        if path.name == "interpreted_triton.py":  # a program that a test starts where torch is
            continue
        for node in syntax_tree(path).body:
            if any(name.split(".")[0] == "torch" for name in imported_modules(node)):
                breaches.append(place(path, node.lineno))
    assert_none(breaches)


def test_local_imports_are_heavy_or_lazy_tables() -> None:
    breaches = []
    for path, function in functions(*PACKAGES):
        if LAZY_FILES.fullmatch(path.name):
            continue
        for node in ast.walk(function):
            light = [name for name in imported_modules(node) if name.split(".")[0] not in LAZY_IMPORTS]
            breaches += [f"{place(path, getattr(node, 'lineno', 1))}: {name} in {function.name}" for name in light]
    assert_none(breaches)


def test_array_modules_evaluate_their_annotations() -> None:
    """`from __future__ import annotations` would hide shapes from run-time checking."""
    breaches = []
    for path in python_files(*PACKAGES):
        modules = [name for node in syntax_nodes(path) for name in imported_modules(node)]
        if "jaxtyping" in modules and "__future__" in modules:
            breaches.append(place(path, 1))
    assert_none(breaches)


def test_no_module_is_named_for_nothing() -> None:
    names = {"utils", "util", "helpers", "misc", "common"}
    assert_none([place(p, 1) for p in python_files(*PACKAGES, "scripts", "tests") if p.stem in names])


def test_predicates_return_bool() -> None:
    breaches = []
    for path, node in functions(*PACKAGES):
        is_predicate = node.name.lstrip("_").startswith(("is_", "can_"))
        if is_predicate and (node.returns is None or ast.unparse(node.returns) != "bool"):
            breaches.append(f"{place(path, node.lineno)}: {node.name}")
    assert_none(breaches)


def exported_definitions() -> Iterator[tuple[Path, str, ast.ClassDef | Function]]:
    """What the packages export, and the public methods of those classes: file, dotted name, definition."""
    for package in PACKAGES:
        for node in ast.walk(syntax_tree(REPOSITORY / package / "__init__.py")):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGES):
                continue
            path = REPOSITORY / f"{(node.module or '').replace('.', '/')}.py"
            exported = {alias.name for alias in node.names}
            for name, definition in public_definitions(path):
                if name.split(".")[0] in exported:
                    yield path, name, definition


def test_the_public_api_has_docstrings() -> None:
    breaches = [
        f"{place(path, 1)}: module"
        for path in python_files(*PACKAGES)
        if path.read_text().strip() and not ast.get_docstring(syntax_tree(path))
    ]
    exported = list(exported_definitions())
    assert {"LLM.generate", "ShardingLayout", "load_array", "choose"} <= {name for _, name, _ in exported}
    for path, name, node in exported:
        is_overload = any(called_name(decorator) == "overload" for decorator in node.decorator_list)
        if not is_overload and not ast.get_docstring(node):
            breaches.append(f"{place(path, node.lineno)}: {name}")
    assert_none(breaches)


def test_functions_are_fully_annotated() -> None:
    """Loop bodies and other functions inside functions are left to inference; Triton's annotations mean constants."""
    inner = {
        id(node)
        for _, outer in functions(*PACKAGES, "scripts")
        for node in ast.walk(outer)
        if isinstance(node, Function) and node is not outer
    }
    breaches = []
    for path, node in functions(*PACKAGES, "scripts"):
        if id(node) in inner or path.name.endswith("_kernels.py"):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        returns_nothing = node.name in ("__init__", "__post_init__")
        if bare or (node.returns is None and not returns_nothing):
            breaches.append(f"{place(path, node.lineno)}: {node.name}({', '.join(bare)})")
    assert_none(breaches)


def test_classes_are_final_or_abstract() -> None:
    """No class of ours inherits from a concrete class of ours; exceptions form a tree all the same."""
    bases = {n.name: [called_name(b) for b in n.bases] for _, n in nodes(*PACKAGES) if isinstance(n, ast.ClassDef)}

    def is_open(name: str) -> bool:
        if name not in bases:
            return name.endswith(("Error", "Exception", "Warning", "ABC", "Protocol"))
        return any(is_open(base) for base in bases[name])

    breaches = []
    for path, node in nodes(*PACKAGES):
        if isinstance(node, ast.ClassDef):
            closed = [base for base in bases[node.name] if base in bases and not is_open(base)]
            breaches += [f"{place(path, node.lineno)}: {node.name}({base})" for base in closed]
    assert_none(breaches)


def test_no_function_exists_twice() -> None:
    seen: dict[str, list[str]] = defaultdict(list)
    for path, node in functions(*PACKAGES, "scripts"):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 >= MIN_DUPLICATE_LINES:
            seen["".join(ast.dump(statement) for statement in body)].append(f"{place(path, node.lineno)}: {node.name}")
    assert_none([" = ".join(places) for places in seen.values() if len(places) > 1])


def test_every_to_do_names_an_issue() -> None:
    breaches = []
    for path in python_files(*PACKAGES, "scripts", "tests"):
        if TO_DO.search(path.read_text()) is None:
            continue
        with tokenize.open(path) as file:
            comments = [t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
        for comment in comments:
            if TO_DO.search(comment.string) and not re.search(r"#\d+", comment.string[1:]):
                breaches.append(place(path, comment.start[0]))
    assert_none(breaches)


def committed_text_files() -> list[Path]:
    """Text files at the root and in the folders that belong to the project (not environments, caches or builds)."""
    folders = [REPOSITORY / name for name in (*PACKAGES, "scripts", "tests", ".ci")]
    inside = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sorted(
        path
        for path in [*REPOSITORY.iterdir(), *inside]
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.parent.name == ".ci")
    )


@pytest.mark.parametrize("what", ["pypi" + ".org", "download.py" + "torch", "--index" + "-url", "extra-index" + "-url"])
def test_no_package_index_is_named(what: str) -> None:
    """Where packages come from is the machine's setting, never the project's."""
    assert_none([place(path, 1) for path in committed_text_files() if what in path.read_text()])


def test_constraints_are_plain_pins() -> None:
    """A local version or a path in a constraints file would tie it to the machine that wrote it."""
    files = sorted((REPOSITORY / "scripts").glob("constraints-*.txt"))
    assert files
    for file in files:
        pins = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert_none([f"{file.name}: {pin}" for pin in pins if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin)])
