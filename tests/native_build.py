"""The module that builds the native kernels, for tests: it lies beside their sources, in no package."""

import importlib.util
import os
from pathlib import Path
from typing import Any


def _load() -> Any:
    path = Path(__file__).resolve().parent.parent / "pallas_kernels" / "native" / "build_library.py"
    spec = importlib.util.spec_from_file_location("build_library", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_library = _load()
HAS_COMPILER = build_library.IS_SUPPORTED and build_library.find_compiler(os.environ) is not None
