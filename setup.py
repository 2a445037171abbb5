"""Build the library of native CPU kernels: everything else about the package is in pyproject.toml.

The sources are C (``pallas_kernels/native``), compiled for AVX-512 and for AVX2 into one library that depends on the C
library alone. A compiler is looked for in this order: ``CC``, clang, gcc, and the package ziglang, which the build asks
for where none of the others is found. On other systems than x86-64 Linux nothing is built and XLA runs everything.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "pallas_kernels" / "native"))

from build_library import IS_SUPPORTED, LIBRARY, SOURCES, build, find_compiler  # noqa: E402  (after the path that it lies on)

COMPILER = find_compiler(os.environ) if IS_SUPPORTED else None


class BuildPy(build_py):
    """Copies the packages, then builds the library beside them, or in the tree for an editable installation."""

    def run(self) -> None:
        """Build."""
        super().run()
        folder = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        library = folder / "pallas_kernels" / LIBRARY
        library.unlink(missing_ok=True)  # one of other sources must not stay
        if COMPILER is not None:
            try:
                build(COMPILER, SOURCES, library)
            except subprocess.CalledProcessError as error:
                # Setuptools makes warnings of other exceptions in an editable build.
                raise SystemExit(f"building the native CPU kernels failed: {shlex.join(error.cmd)}") from error
        elif IS_SUPPORTED:
            self.warn("no C compiler was found: the native CPU kernels are left out, and XLA runs everything")


class Wheel(bdist_wheel):
    """Names the platform that the library is for; Python's version does not matter to it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the wheel."""
        if COMPILER is None:
            return super().get_tag()
        return "py3", "none", "manylinux_2_28_x86_64" if COMPILER.is_portable else "linux_x86_64"


class WithLibrary(Distribution):
    """A distribution that is for one platform where it holds the library."""

    def has_ext_modules(self) -> bool:
        """Return whether it does."""
        return COMPILER is not None


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel}, distclass=WithLibrary)
