"""Frozen tests are as they were, and a change of one is noticed (``scripts/frozen_tests.py``)."""

import json
from pathlib import Path

import pytest

from scripts.frozen_tests import HELPERS, ROOT, TABLE, check, digest, inner_imports, main

SOURCE = '''"""A test."""

import pytest

from jaxserve import LLM

SLOW = pytest.mark.slow
"""Each costs a start."""


@pytest.fixture(scope="module")
def llm():
    with LLM("demo") as made:
        yield made


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=[SLOW])])
@pytest.mark.parametrize("a, b", [(1, 2), pytest.param(3, 4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_tokens(llm, size, a, b):
    assert len(llm.generate("1+1=")) == 1, f"{size} and {a!r:>4}"
'''


def changed(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("== 1,", "== 2,"),
        ("assert len", "assert not len"),
        ("    assert", "    return\n    assert"),
        ("and {a!r:>4}", "and {a!r:>5}"),
        ("[1, ", "["),
        ("(3, 4, marks=pytest.mark.slow)", "(3, 5, marks=pytest.mark.slow)"),
        ("pytest.param(2, marks=pytest.mark.slow)", "pytest.param(2, marks=pytest.mark.skip)"),
        ("@pytest.mark.slow\n", "@pytest.mark.skip\n"),
        ("@pytest.mark.slow\n", "@pytest.mark.xfail\n@pytest.mark.slow\n"),
        ('(scope="module")', '(scope="module", autouse=True)'),
        ("SLOW = pytest.mark.slow", "SLOW = pytest.mark.skip"),
        ("def test_tokens", "def check_tokens"),
        ("SLOW =", "pytestmark = [pytest.mark.skip]\nSLOW ="),
    ],
)
def test_a_change_is_noticed(old: str, new: str) -> None:
    assert digest(changed(old, new)) != digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from jaxserve import LLM\n", "from tests.hooks import LLM\n"),
        ("import pytest\n", "import json\n\nimport pytest\n"),
        ('(scope="module")', ""),
        ('(scope="module")', '(scope="session")'),
        ("@pytest.mark.slow\n", ""),
        ("    with LLM", "    # why\n    with LLM"),
        ("pytest.param(2, marks=pytest.mark.slow)", "2"),
        ("[1, ", "[pytest.param(1, marks=[pytest.mark.slow]), "),
        (", pytest.param(3, marks=[SLOW])", ", pytest.param(3, marks=[SLOW] if 3 > 2 else [])"),
        ("[(1, 2)", "[pytest.param(1, 2, marks=SLOW)"),
        ("pytest.param(3, 4, marks=pytest.mark.slow)", "(3, 4)"),
        ('SLOW = pytest.mark.slow\n"""Each costs a start."""', "SLOW = pytest.mark.slow"),
        ("SLOW =", "pytestmark = [pytest.mark.slow]\nSLOW ="),
    ],
)
def test_what_may_change_is_not_noticed(old: str, new: str) -> None:
    assert digest(changed(old, new)) == digest(SOURCE)


def test_other_marks_stay_beside_the_slow_one() -> None:
    both = changed("(2, marks=pytest.mark.slow)", "(2, marks=[pytest.mark.slow, pytest.mark.gpu])")
    other = changed("(2, marks=pytest.mark.slow)", "(2, marks=pytest.mark.gpu)")
    assert digest(both) == digest(other) != digest(SOURCE)


def test_the_hash_is_the_same_from_every_version_of_python() -> None:
    assert digest(SOURCE) == "b8c3144682322150121aa9e74eb0684f2c7f54ac1f8a4bee55fad0929e9b943c"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one frozen file."""
    (tmp_path / "tests/rooms").mkdir(parents=True)
    (tmp_path / "tests/test_a.py").write_text(SOURCE)
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve/__init__.py").write_text('__all__ = ["LLM"]\n')
    return tmp_path


def test_a_file_may_move_and_may_not_change(repository: Path) -> None:
    table, file = {"tests/test_a.py": digest(SOURCE)}, repository / "tests/test_a.py"
    assert check(table, repository) == ([], {})
    file.rename(repository / "tests/rooms/test_b.py")
    assert check(table, repository) == ([], {"tests/test_a.py": "tests/rooms/test_b.py"})
    (repository / "tests/rooms/test_b.py").rename(repository / "tests/rooms/not_collected.py")
    (error,) = check(table, repository).errors
    assert error.startswith("tests/test_a.py: missing, and no file under tests/ has its content")
    file.write_text(changed("== 1,", "== 2,"))
    (error,) = check(table, repository).errors
    assert error.startswith("tests/test_a.py: changed; a frozen file may change only its path, imports, slow marks")


def test_an_import_of_an_internal_is_named(repository: Path) -> None:
    source = changed("from jaxserve import LLM\n", "from jaxserve import LLM, cli, llm\n")
    (repository / "tests/test_a.py").write_text(source)
    (error,) = check({"tests/test_a.py": digest(SOURCE)}, repository).errors
    assert error == (
        "tests/test_a.py:5: a frozen file cannot import jaxserve.cli, jaxserve.llm; use a name of tests/hooks.py"
    )


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    [
        ("import jaxserve", True),
        ("from jaxserve import LLM", True),
        ("from jaxserve import async_llm", False),
        ("from jaxserve import *", False),
        ("import jaxserve.engine.engine", False),
        ("from jaxserve.client import Client", True),
        ("from jaxserve.client.channel import connect", False),
        ("from jaxserve.server.proto.jaxserve.v1 import chat_pb2, model_pb2_grpc", True),
        ("from jaxserve.server.proto import codec", False),
        ("from sharding import ShardingLayout", False),
        ("from scripts.server_child import running_server", True),
        ("from scripts import soak_server", False),
        ("from tests.hooks import held", True),
        ("from tests import hooks", True),
        ("from tests.tiny_programs import make_program", False),
        ("import numpy.random", True),
    ],
)
def test_imports(line: str, is_allowed: bool) -> None:
    assert (list(inner_imports(f"def test_a():\n    {line}\n", HELPERS, frozenset(["LLM"]))) == []) == is_allowed


def test_the_command_says_what_is_wrong(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = repository / "tests/test_a.py"
    assert main(["--write", "tests/test_a.py"], repository) == main([], repository) == 0
    file.rename(repository / "tests/rooms/test_b.py")
    assert main([], repository) == 0
    assert capsys.readouterr().out.endswith(
        "tests/test_a.py: moved to tests/rooms/test_b.py\n1 frozen files, 0 errors\n"
    )
    file.write_text(changed("== 1,", "== 2,"))
    (repository / "tests/rooms/test_b.py").unlink()
    assert main([], repository) == 1
    assert capsys.readouterr().out.startswith("tests/test_a.py: changed; a frozen file may change only")
    assert main(["--write"], repository) == main([], repository) == 0


def test_frozen_files_are_as_they_were() -> None:
    table = json.loads((ROOT / TABLE).read_text())
    assert len(table) >= 30
    report = check(table, ROOT)
    assert not report.errors, "\n" + "\n".join(report.errors)


def test_every_helper_exists() -> None:
    for name in HELPERS:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
