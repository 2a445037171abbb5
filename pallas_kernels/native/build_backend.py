"""Build with setuptools, and ask for the package ziglang (100 MB) only where no other C compiler is found."""

import os
from typing import Any

from build_library import IS_SUPPORTED, find_compiler
from setuptools import build_meta

ZIG = "ziglang>=0.15,<0.18"

# The hooks of PEP 517 and PEP 660 that are setuptools' own.
build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what building a wheel needs."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable installation needs."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]


def _compiler() -> list[str]:
    """Return ziglang where the native kernels can run and nothing else compiles them."""
    return [ZIG] if IS_SUPPORTED and find_compiler(os.environ) is None else []
