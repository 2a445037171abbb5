"""Faults for a server's processes: Python imports this module at its start where the folder is on PYTHONPATH.

``JAXSERVE_TEST_FAULTS`` names a folder. Requests with a mark fail in the place that it names; a file in the folder
makes every step fail, or hang, while it is there. Unpickling is written down in a file of that folder.
"""

import importlib.abc
import importlib.machinery
import os
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


def _patch_request_state(module: Any) -> None:
    extend = module.Sample.extend

    def faulty(self: Any, *arguments: Any) -> Any:
        return _raise() if DETOKENIZER_STOP_ID in self.sequence.stop_ids else extend(self, *arguments)

    module.Sample.extend = faulty


def _patch_grammars(module: Any) -> None:
    write = module.write_grammar

    def faulty(params: Any, *arguments: Any) -> Any:
        return _raise() if GRAMMAR_MARK in str(params) else write(params, *arguments)

    module.write_grammar = faulty


def _patch_runner(module: Any) -> None:
    launch = module.StepRunner.launch
    assert FOLDER is not None
    fails, hangs = Path(FOLDER) / "step-fails", Path(FOLDER) / "step-hangs"

    def faulty(self: Any, *arguments: Any, **options: Any) -> Any:
        while hangs.exists():
            time.sleep(0.05)
        return _raise() if fails.exists() else launch(self, *arguments, **options)

    module.StepRunner.launch = faulty


PATCHES: dict[str, Callable[[Any], None]] = {
    "jaxserve.engine.tokenizer": _patch_tokenizer,
    "jaxserve.engine.admission": _patch_admission,
    "jaxserve.engine.request_state": _patch_request_state,
    "jaxserve.engine.grammars": _patch_grammars,
    "jaxserve.engine.runner": _patch_runner,
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


def _note_unpickling(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and FOLDER is not None:
        with open(Path(FOLDER) / "unpickled", "a") as file:
            file.write(f"{' '.join(sys.argv)}: {arguments}\n")


if FOLDER is not None:
    sys.meta_path.insert(0, PatchingFinder())
    sys.addaudithook(_note_unpickling)
