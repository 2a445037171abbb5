"""Faults for a server's processes: Python imports this module at its start where the folder is on PYTHONPATH.

``JAXSERVE_TEST_FAULTS`` names a folder. Requests with a mark fail in the place that it names; a file in the folder
makes every step fail, hang or take long, or an engine's start hang, while it is there, and a folder in it lets steps
through one by one. Unpickling is written down in a file of that folder. Python's listeners send from small buffers, as
if clients were far away: what one does not read is soon felt.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("JAXSERVE_TEST_FAULTS")
TOKENIZER_MARK = "tokenizer fault"
SAMPLER_SEED = 666
DETOKENIZER_STOP_ID = 7
GRAMMAR_MARK = "grammar fault"
GATE = "gate"
"""A folder: while it is there, each step waits for a file in it, and takes it away."""
WAITING = "waiting"
"""A file that is there while a step waits at the gate."""
PAUSE = "step-pause"
"""A file with seconds, which each step takes longer while it is there."""
STEP_HOLDS_LOCK = "step-holds-lock"
"""A file: while it is there, a step keeps Python's lock, so that no other thread of the process runs."""
START_HANGS = "start-hangs"
"""A file: while it is there, no engine gets ready."""
FOLLOWER_FAILS, FOLLOWER_HANGS = "follower-fails", "follower-hangs"
FOLLOWER_DIVERGES, FOLLOWER_MISREADS = "follower-diverges", "follower-misreads"
FOLLOWER_EXITS, FOLLOWER_EXHAUSTS = "follower-exits", "follower-exhausts"
FOLLOWER_STALLS = "follower-stalls"
ONE_RELAY = "one-relay"
"""A file: in groups that start while it is there, process 0 sends steps to one follower, which passes them on."""
DISK_FULL = "disk-full"
"""A file: processes that start while it is there can make no file longer than ``LONGEST_FILE``."""
CLOCK = "clock"
"""A file with seconds by which the time of day is wrong in all processes; ``stopped``: it stays what it was."""
SEND_BYTES = 32 << 10
"""What the system takes in of an answer that is not read."""
LONGEST_FILE = 24 << 10
"""Longer than a log, shorter than most programs of a model."""


class InjectedError(RuntimeError):
    """A fault that nobody foresaw; its text must reach no client."""


def _raise(*_: Any, **__: Any) -> None:
    raise InjectedError("injected: /secret/path")


def _patch_tokenizer(module: Any) -> None:
    encode = module.Tokenizer.encode

    def faulty(self: Any, text: str, *arguments: Any, **options: Any) -> Any:
        return _raise() if TOKENIZER_MARK in text else encode(self, text, *arguments, **options)

    module.Tokenizer.encode = faulty


def _patch_admission(module: Any) -> None:
    make = module.make_sampling

    def faulty(params: Any, **options: Any) -> Any:
        return _raise() if params.seed == SAMPLER_SEED else make(params, **options)

    module.make_sampling = faulty

    make_detokenizer = module._detokenizer

    def with_faulty_detokenizer(pieces: Any, params: Any, prompt: Any) -> Any:
        detokenizer = make_detokenizer(pieces, params, prompt)
        if DETOKENIZER_STOP_ID in (params.stop_token_ids or ()):
            detokenizer.push_tokens = _raise  # its first token already fails
        return detokenizer

    module._detokenizer = with_faulty_detokenizer


def _patch_grammars(module: Any) -> None:
    write = module.write_grammar

    def faulty(params: Any, *arguments: Any) -> Any:
        return _raise() if GRAMMAR_MARK in str(params) else write(params, *arguments)

    module.write_grammar = faulty


def _patch_runner(module: Any) -> None:
    launch = module.LocalRunner.launch
    assert FOLDER is not None
    fails, hangs = Path(FOLDER) / "step-fails", Path(FOLDER) / "step-hangs"

    def faulty(self: Any, *arguments: Any, **options: Any) -> Any:
        while hangs.exists():
            time.sleep(0.05)
        if (Path(FOLDER or "") / STEP_HOLDS_LOCK).exists():
            ctypes.PyDLL(None).sleep(3600)  # a call that, unlike CDLL's, keeps the lock
        _pass_gate(Path(FOLDER or ""))
        return _raise() if fails.exists() else launch(self, *arguments, **options)

    module.LocalRunner.launch = faulty


def _pass_gate(folder: Path) -> None:
    gate, waiting = folder / GATE, folder / WAITING
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float((folder / PAUSE).read_text()))
    while gate.exists():
        with contextlib.suppress(FileNotFoundError):  # it is opened at this moment
            for ticket in gate.glob("*"):
                # Before the ticket: who gave it sees it go, and waits for the next step.
                waiting.unlink(missing_ok=True)
                ticket.unlink(missing_ok=True)
                return
        waiting.touch()
        time.sleep(0.002)
    waiting.unlink(missing_ok=True)


def _patch_startup(module: Any) -> None:
    start = module.start_engine
    assert FOLDER is not None
    hangs = Path(FOLDER) / START_HANGS

    def faulty(*arguments: Any) -> Any:
        while hangs.exists():
            time.sleep(0.02)
        return start(*arguments)

    module.start_engine = faulty


def _patch_follower(module: Any) -> None:
    """Followers of a group fail, hang, or compute other tokens at their next step while a file is there."""
    decode, add = module.decode_plans, module.Digests.add
    assert FOLDER is not None
    folder = Path(FOLDER)

    def faulty_decode(data: bytes) -> Any:
        while (folder / FOLLOWER_HANGS).exists():
            time.sleep(0.05)
        if (folder / FOLLOWER_EXITS).exists():
            os._exit(9)
        if (folder / FOLLOWER_EXHAUSTS).exists():
            _use_all_memory()
        if (folder / FOLLOWER_MISREADS).exists():
            data = data[:-1]
        return _raise() if (folder / FOLLOWER_FAILS).exists() else decode(data)

    def faulty_add(self: Any, *arguments: Any) -> bytes:
        digest = add(self, *arguments)
        return digest[::-1] if (folder / FOLLOWER_DIVERGES).exists() else digest

    module.decode_plans, module.Digests.add = faulty_decode, faulty_add
    _patch_steps_of_follower(module.LocalRunner, folder / FOLLOWER_STALLS)


def _patch_relays(module: Any) -> None:
    if (Path(FOLDER or "") / ONE_RELAY).exists():
        module.NUM_RELAYS = 1


def _patch_steps_of_follower(runner: Any, stalls: Path) -> None:
    """While a file is there, a follower's device does nothing, so that those of all others wait in a collective."""
    launch, collect = runner.launch, runner.collect

    def faulty_launch(self: Any, *arguments: Any) -> None:
        if not stalls.exists():
            launch(self, *arguments)

    def faulty_collect(self: Any) -> Any:
        while stalls.exists():
            time.sleep(0.05)
        return collect(self)

    runner.launch, runner.collect = faulty_launch, faulty_collect


def _use_all_memory() -> None:
    """Let this process have little more memory than it has, and use it up."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20), most))
    held = list[bytearray]()
    while True:
        held.append(bytearray(4 << 20))


PATCHES: dict[str, Callable[[Any], None]] = {
    "jaxserve.text.tokenizer": _patch_tokenizer,
    "jaxserve.engine.admission": _patch_admission,
    "jaxserve.structured_output.grammars": _patch_grammars,
    "jaxserve.device.runner": _patch_runner,
    "jaxserve.engine.startup": _patch_startup,
    "jaxserve.group.follower": _patch_follower,
    "jaxserve.group.relays": _patch_relays,
}


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches modules when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec, with a loader that patches what it has loaded."""
        if fullname not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            PATCHES[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


def _patch_listeners() -> None:
    listen = socket.socket.listen

    def listen_with_small_buffers(self: socket.socket, *arguments: Any) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # what it accepts has the same
        listen(self, *arguments)

    socket.socket.listen = listen_with_small_buffers


def _patch_clock(switch: Path) -> None:
    """Let the time of day stop or jump; the clock of timers goes on, as on every system."""
    now_s, now_ns, stopped = time.time, time.time_ns, list[int]()

    def wrong_ns() -> int:
        try:
            said = switch.read_text()
        except FileNotFoundError:
            return now_ns()
        if said == "stopped":
            stopped[:] = stopped or [now_ns()]
            return stopped[0]
        return now_ns() + int(float(said or 0) * 1e9)

    time.time_ns = lambda: wrong_ns() if switch.exists() else now_ns()
    time.time = lambda: wrong_ns() / 1e9 if switch.exists() else now_s()


def _note_unpickling(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and FOLDER is not None:
        with open(Path(FOLDER) / "unpickled", "a") as file:
            file.write(f"{' '.join(sys.argv)}: {arguments}\n")


if FOLDER is not None:
    sys.meta_path.insert(0, PatchingFinder())
    sys.addaudithook(_note_unpickling)
    _patch_listeners()
    _patch_clock(Path(FOLDER) / CLOCK)
    if (Path(FOLDER) / DISK_FULL).exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, LONGEST_FILE))
