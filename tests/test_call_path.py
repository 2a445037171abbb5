"""What ``scripts/count_call_path.py`` counts as executed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.count_call_path import count, executed_statements
from scripts.path_tracer.scenarios import OFF, ON, WRITE

TRACER = Path(__file__).resolve().parent.parent / "scripts" / "path_tracer"
SOURCE = textwrap.dedent(
    """\
    class Box:
        pass

    def outer(x):
        if x:
            total = sum(
                [x,
                 1],
            )
        else:
            total = 0
        return inner(total)

    def inner(x):
        return Box()

    def later():
        return 2
    """
)


@pytest.mark.parametrize(
    ("lines", "statements"),
    [(set(), 0), ({5}, 1), ({6, 7, 8}, 1), ({5, 7, 12}, 3), ({11}, 1), ({4, 5}, 2), ({2}, 1)],
)
def test_a_statement_counts_once_by_its_own_lines(lines, statements):
    assert executed_statements(SOURCE, lines) == statements


def test_every_process_and_thread_is_traced_while_the_switch_is_on(tmp_path):
    """What runs before and after, and what other packages run, does not count."""
    root = tmp_path / "root"
    (root / "jaxserve").mkdir(parents=True)
    (root / "jaxserve" / "__init__.py").write_text(SOURCE)
    (root / "other.py").write_text("def f():\n    return 1\n")
    notes = tmp_path / "notes"
    notes.mkdir()
    switch = notes / "switch"
    switch.write_bytes(OFF)
    program = f"""
import os, subprocess, sys, threading, time
import jaxserve, other
def turn(value):
    with open({str(switch)!r}, "r+b") as file:
        file.write(value)
if len(sys.argv) > 1:
    print("ready", flush=True)
    sys.stdin.readline()
    other.f()
    jaxserve.outer(0)
    print("done", flush=True)
else:
    command = [sys.executable, __file__, "child"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    jaxserve.later()
    turn({ON!r})
    thread = threading.Thread(target=jaxserve.outer, args=(1,))
    thread.start()
    thread.join()
    print(file=child.stdin, flush=True)
    child.stdout.readline()
    turn({OFF!r})
    jaxserve.later()
    turn({WRITE!r})
time.sleep(1.0)
"""
    (tmp_path / "program.py").write_text(program)
    settings = {"folder": str(notes), "root": str(root), "packages": ["jaxserve"]}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRACER), str(root)]),
        "PYTHON_PATH_TRACE": json.dumps(settings),
    }
    subprocess.run([sys.executable, str(tmp_path / "program.py")], env=environment, check=True, timeout=60)
    found = count([json.loads(each.read_text()) for each in notes.glob("*.json")], root)
    assert found["processes"] == 2
    assert (found["files"], found["functions"], found["statements"]) == (1, 2, 5)  # if, assignments, returns
    assert found["classes"] == (1 if sys.version_info >= (3, 12) else 0)
