"""Look for inputs that break what reads them: files, request bodies, completions, messages of other processes.

    python scripts/fuzz_inputs.py                            every target of tests/fuzzing/registry.py, 20 minutes each
    python scripts/fuzz_inputs.py http_body --seconds 120    one of them, two minutes
    python scripts/fuzz_inputs.py http_body --input FILE     read one file, such as a crash that was found
    python scripts/fuzz_inputs.py http_body --add FILE ...   add files to the inputs that the gate replays

With the package atheris, which has wheels for Linux on x86-64, branches that an input reaches guide the search;
elsewhere lines do, which Python's own tracing sees more slowly. An input that fails is written to FINDINGS, and
the exit status is 1: mend the product, and add the input to ``tests/fuzzing/corpora``, from which the gate replays it.
``--keep`` adds inputs that reach new branches to a folder, from which ``--keep`` of the next run goes on.
"""

import argparse
import hashlib
import importlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzzing.registry import TARGETS  # noqa: E402  (after the path that it lies on)
from tests.fuzzing.target import add_to_corpus, corpus, load, mutated  # noqa: E402

_HANGS_AFTER_S = 20
_MAX_RSS_MIB = 4096
_MAX_INPUT_BYTES = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz targets one after the other; return the exit status."""
    options = _parser().parse_args(arguments)
    names = options.target or TARGETS
    if options.input is not None:
        load(names[0]).run(options.input.read_bytes())
        return 0
    if options.add:
        add_to_corpus(names[0], [path.read_bytes() for path in options.add])
        return 0
    options.findings.mkdir(parents=True, exist_ok=True)
    if len(names) == 1:
        return (_with_branches if find_spec("atheris") else _with_lines)(names[0], options)
    failed = [name for name in names if _in_own_process(name, options)]
    if failed:
        print(f"inputs that fail were found for: {', '.join(failed)}; see {options.findings}")
    return 1 if failed else 0


def _in_own_process(name: str, options: argparse.Namespace) -> int:
    """Fuzz one target in a process that may end, and return its status."""
    flags = ["--seconds", str(options.seconds), "--seed", str(options.seed), "--findings", str(options.findings)]
    flags += [] if options.keep is None else ["--keep", str(options.keep)]
    return subprocess.run([sys.executable, __file__, name, *flags]).returncode


def _with_branches(name: str, options: argparse.Namespace) -> int:
    """Fuzz a target with libFuzzer, which ends this process."""
    atheris: Any = importlib.import_module("atheris")
    packages = _packages(name)
    with atheris.instrument_imports(include=packages, enable_loader_override=False):
        target = load(name)
    kept = options.findings / f"{name}-corpus" if options.keep is None else options.keep / name
    seeds = options.findings / f"{name}-seeds"
    for folder in (kept, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds, *corpus(name)]):
        (seeds / str(number)).write_bytes(seed)
    words = options.findings / f"{name}.words"
    escaped = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words]
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    rng = random.Random(options.seed)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng.seed(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(data, max_size)
        return mutated(target, data, rng, rng.choice(target.seeds))[:max_size]

    flags = [
        f"-max_total_time={options.seconds}",
        f"-seed={options.seed}",
        f"-dict={words}",
        f"-max_len={_MAX_INPUT_BYTES}",
    ]
    flags += [f"-timeout={_HANGS_AFTER_S}", f"-rss_limit_mb={_MAX_RSS_MIB}", "-print_final_stats=1", "-verbosity=0"]
    flags += [f"-artifact_prefix={options.findings}/{name}-"]
    print(f"{name}: {options.seconds} s, seed {options.seed}", flush=True)
    atheris.Setup([name, *flags, str(kept), str(seeds)], target.run, custom_mutator=mutate)
    atheris.Fuzz()  # does not return
    return 1


def _packages(name: str) -> list[str]:
    """Return the modules that a target wants to see, without an import of the target."""
    code = subprocess.run(
        [sys.executable, "-c", f"from tests.fuzzing.target import load; print(*load({name!r}).packages)"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return code.stdout.split()


def _with_lines(name: str, options: argparse.Namespace) -> int:
    """Change inputs at random until the time is over, and go on from those that reach new lines."""
    target, rng = load(name), random.Random(options.seed)
    lines = _Lines(target.packages)
    kept = None if options.keep is None else options.keep / name
    inputs, num_done, end_s = [*target.seeds, *corpus(name)], 0, time.monotonic() + options.seconds
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        inputs += [path.read_bytes() for path in sorted(kept.iterdir())]
    print(f"{name}: {options.seconds} s, seed {options.seed}, guided by lines: the package atheris is not installed")
    for data in inputs:
        lines.reaches_new(target.run, data)
    while time.monotonic() < end_s:
        data = mutated(target, rng.choice(inputs), rng, rng.choice(inputs))[:_MAX_INPUT_BYTES]
        num_done += 1
        try:
            is_new = lines.reaches_new(target.run, data)
        except Exception:
            found = options.findings / f"{name}-crash-{num_done}"
            found.write_bytes(data)
            print(f"{name}: execution {num_done} failed; its input is in {found}", flush=True)
            raise
        if is_new:
            inputs.append(data)
            if kept is not None:
                (kept / hashlib.sha1(data).hexdigest()).write_bytes(data)
    print(f"{name}: {num_done} executions, {lines.num_lines} lines, no finding")
    return 0


class _Lines:
    """Lines of some modules that inputs have reached.

    Args:
        packages: The modules, with those below them.
    """

    def __init__(self, packages: Sequence[str]):
        origins = [Path(str(spec.origin)) for package in packages if (spec := find_spec(package)) is not None]
        self._places = tuple(str(path.parent if path.stem == "__init__" else path) for path in origins)
        self._reached = set[tuple[CodeType, int]]()

    @property
    def num_lines(self) -> int:
        """Number of lines reached so far."""
        return len(self._reached)

    def reaches_new(self, run: Callable[[bytes], None], data: bytes) -> bool:
        """Run a target with an input; return whether lines were reached that none had reached before."""
        before, previous = len(self._reached), sys.gettrace()
        sys.settrace(self._enter)
        try:
            run(data)
        finally:
            sys.settrace(previous)
        return len(self._reached) > before

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename.startswith(self._places) else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._reached.add((frame.f_code, frame.f_lineno))
        return self._step


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("target", nargs="*", choices=[[], *TARGETS], help="targets; all of them by default")
    made.add_argument("--seconds", type=int, default=1200, help="for each target")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder of inputs that fail")
    made.add_argument("--keep", type=Path, help="folder of the corpora that grow")
    made.add_argument("--add", type=Path, nargs="+", help="files that become part of the target's corpus")
    made.add_argument("--input", type=Path, help="a file that the target reads once")
    return made


if __name__ == "__main__":
    sys.exit(main())
