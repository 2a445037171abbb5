"""Break the product in one place at a time, and check that the gate's tests notice each fault.

    python scripts/mutations.py                      all mutations; prints a table, exit status 1 if one was not caught
    python scripts/mutations.py --only scheduler     mutations whose name contains this
    python scripts/mutations.py --revision 7f6c05d   the same mutations in another commit, with that commit's tests
    python scripts/mutations.py --whole              if the likely tests do not notice a fault, run all the others too

For each mutation, one expression is replaced in a copy of the tree, and the tests of the gate that are likely to notice
run until the first failure; before that they run without the mutation, so that a failure means something. It takes
about ten minutes on two cores; run it after a change of which tests are in the gate.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """A deliberate fault.

    Attributes:
        name: What it breaks.
        path: File that it changes.
        old: Text that occurs once in the file.
        new: Text that replaces it.
        tests: Files and directories of tests that are likely to notice, tried first.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "scheduler: preempts the first sequence instead of the last",
        "jaxserve/scheduling/scheduler.py",
        "step.preempts, victim = True, self.running[-1]",
        "step.preempts, victim = True, self.running[0]",
        ("tests/jaxserve/test_scheduler.py",),
    ),
    Mutation(
        "pages: a shared page is given away while another sequence holds it",
        "jaxserve/scheduling/page_allocator.py",
        "            if self._num_holders[page]:\n                continue\n",
        "",
        ("tests/jaxserve/test_page_allocator.py",),
    ),
    Mutation(
        "prefix cache: the key of a page ignores the pages before it",
        "jaxserve/scheduling/prefix_cache.py",
        "return hashlib.sha256(parent + content).digest()",
        "return hashlib.sha256(content).digest()",
        ("tests/jaxserve/test_prefix_cache.py",),
    ),
    Mutation(
        "sampler: presence penalty once for each occurrence",
        "jaxserve/sampling/penalties.py",
        "jnp.where(in_output > 0, inputs.options.presence_penalty[:, None], 0.0)",
        "inputs.options.presence_penalty[:, None] * in_output",
        ("tests/jaxserve/test_penalties.py", "tests/jaxserve/test_sampler.py"),
    ),
    Mutation(
        "native kernel: quantized weights are decoded with the scale of a tile's first group",
        "pallas_kernels/native/dequantize.c",
        "const float factor = number_of(job->scales, group, job->run_groups[run]);",
        "const float factor = number_of(job->scales, group, job->run_groups[columns.run]);",
        ("tests/checkpoints/quantized/test_native.py",),
    ),
    Mutation(
        "native kernel: the argmax of a row misses its last numbers",
        "pallas_kernels/native/argmax.c",
        "for (; i < count; i += LANES) {",
        "for (; i + LANES <= count; i += LANES) {",
        ("tests/pallas_kernels/test_kernels.py", "tests/pallas_kernels/test_native.py"),
    ),
    Mutation(
        "collective: partial sums of a row-parallel layer are averaged",
        "sharding/collectives.py",
        "return lax.psum(x, axis) if axis else x",
        "return lax.pmean(x, axis) if axis else x",
        ("tests/sharding", "tests/jaxserve/test_layers.py"),
    ),
    Mutation(
        "loader: a device reads the wrong part of a transposed matrix",
        "checkpoints/loader.py",
        "zip(starts, piece.target_start, strict=True)][::order]",
        "zip(starts, piece.target_start, strict=True)]",
        ("tests/checkpoints",),
    ),
    Mutation(
        "parser: a number's exponent loses its sign",
        "jaxserve/parsers/json_scanner.py",
        '"exponent": {"0": "power", "1": "power", "+": "sign", "-": "sign"},',
        '"exponent": {"0": "power", "1": "power"},',
        ("tests/jaxserve/test_tool_parsers.py",),
    ),
    Mutation(
        "HTTP: the usage counts the tokens of one prompt of several",
        "jaxserve/server/http_api/generation.py",
        "num_prompt = sum(entry.num_prompt_tokens or 0 for",
        "num_prompt = max(entry.num_prompt_tokens or 0 for",
        ("tests/jaxserve/server",),
    ),
    Mutation(
        "gRPC: a stop token is returned as no stop reason",
        "jaxserve/server/proto_codec.py",
        "stop_token_id=stop if isinstance(stop, int) else None,",
        "stop_token_id=stop if isinstance(stop, int) and stop else None,",
        ("tests/jaxserve/server/test_protos.py", "tests/jaxserve/server"),
    ),
    Mutation(
        "resharding: the cached pages of all layers are written to the first one",
        "jaxserve/reshard/page_transfer.py",
        "return (num_pages * jnp.arange(count, dtype=jnp.int32)[:, None] + pages).ravel()",
        "return (0 * jnp.arange(count, dtype=jnp.int32)[:, None] + pages).ravel()",
        ("tests/jaxserve/reshard/test_reshard.py",),
    ),
    Mutation(
        "plan: devices of one host share the memory's bandwidth twice",
        "jaxserve/lab/plan/costs.py",
        "rate = device.bytes_per_s * device.bandwidth_share / sharing",
        "rate = device.bytes_per_s * device.bandwidth_share / sharing / sharing",
        ("tests/jaxserve/lab/test_lab_plan.py", "tests/jaxserve/lab/test_calibration.py"),
    ),
    Mutation(
        "states: one is saved a token late",
        "jaxserve/device/batch.py",
        'views["query_starts"][row] + num_tokens - 1',
        'views["query_starts"][row] + num_tokens',
        ("tests/jaxserve/test_hybrids.py",),
    ),
    Mutation(
        "states: rows have those of their neighbours",
        "jaxserve/device/batch.py",
        'views["state_pages"][: len(rows)] = pages',
        'views["state_pages"][: len(rows)] = np.roll(pages, 1)',
        ("tests/jaxserve/test_hybrids.py",),
    ),
    Mutation(
        "states: the tail of a convolution stays where it is",
        "pallas_kernels/recurrent_states.py",
        "return tuple(copy_pool_pages(array, sources, targets) for array in arrays)",
        "return (arrays[0], *(copy_pool_pages(array, sources, targets) for array in arrays[1:]))",
        ("tests/jaxserve/test_hybrids.py",),
    ),
    Mutation(
        "states: a cached prompt goes on without its checkpoint",
        "jaxserve/scheduling/step.py",
        "if sequence.state_source not in (-1, sequence.state_page):",
        "if sequence.state_source < -1:",
        ("tests/jaxserve/test_state_events.py",),
    ),
    Mutation(
        "states: a rejected draft stays in one",
        "jaxserve/scheduling/drafts.py",
        "sequence.restart = sequence.draft_length if sequence.draft_page >= 0 else -1",
        "sequence.restart = -1",
        ("tests/jaxserve/test_state_events.py",),
    ),
    Mutation(
        "reshard: a state moves to another one's page",
        "jaxserve/reshard/cache_moves.py",
        "moves.append(StateMove(lane, checkpoint.page, target))",
        "moves.append(StateMove(lane, states[0][1][0].page, target))",
        ("tests/jaxserve/test_state_events.py",),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the names of the mutations to run")
    parser.add_argument("--revision", help="a commit whose product and tests are used instead of the working tree")
    parser.add_argument("--whole", action="store_true", help="run the rest of the gate on a fault that was not caught")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        parser.error(f"no mutation has {options.only!r} in its name")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        _copy_tree(copy, options.revision)
        for mutation in chosen:
            verdict = _try(copy, mutation, options.whole)
            survivors += not verdict.startswith("caught")
            print(f"{mutation.name}: {verdict}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations were caught")
    return 1 if survivors else 0


def _try(copy: Path, mutation: Mutation, is_whole: bool) -> str:
    """Run the tests on a mutation; return what happened."""
    path, began = copy / mutation.path, time.monotonic()
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"not tried: {mutation.path} contains the text {source.count(mutation.old)} times, expected once"
    failed = _failed_test(copy, mutation.tests)
    if failed is not None:
        return f"not tried: {failed} fails without it"
    path.write_text(source.replace(mutation.old, mutation.new))
    is_native = path.suffix == ".c"
    try:
        if is_native:
            _build_native(copy)
        failed = _failed_test(copy, mutation.tests)
        if failed is None and is_whole:
            failed = _failed_test(copy, ("tests",))
    finally:
        path.write_text(source)
        if is_native:
            _build_native(copy)
    took = f"{time.monotonic() - began:.0f} s"
    return f"NOT CAUGHT ({took})" if failed is None else f"caught by {failed} ({took})"


def _failed_test(copy: Path, tests: Iterable[str]) -> str | None:
    """Run tests until the first failure; return its name."""
    given = [test for test in tests if (copy / test).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([*command, *given], cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode == 0:
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    return next(
        (line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))), f"exit {done.returncode}"
    )


def _copy_tree(target: Path, revision: str | None) -> None:
    """Copy the files that git knows, of the working tree or of a commit, and build the native library there."""
    target.mkdir()
    if revision is None:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True).stdout
        names = [name for name in listed.decode().split("\0") if (_ROOT / name).is_file()]
        archive = ["tar", "-c", "--null", "-T", "-"]
        packed = subprocess.run(archive, cwd=_ROOT, check=True, capture_output=True, input="\0".join(names).encode())
    else:
        packed = subprocess.run(["git", "archive", revision], cwd=_ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(target)], check=True, input=packed.stdout)
    shared = _ROOT.parent / "shared"
    if shared.is_dir():
        (target.parent / "shared").symlink_to(shared)
    _build_native(target)


def _build_native(copy: Path) -> None:
    """Compile the native kernels of a copy into it."""
    code = (
        "import os, build_library as b\nb.build(b.find_compiler(os.environ), b.SOURCES, b.SOURCES.parent / b.LIBRARY)"
    )
    folder = copy / "pallas_kernels" / "native"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
