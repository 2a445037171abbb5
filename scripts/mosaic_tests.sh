#!/usr/bin/env bash
# Runs the tests of the Pallas Mosaic GPU kernels with JAX 0.11.2, whose interpreter runs them on a CPU: they are skipped
# on Python 3.11, which has no JAX newer than 0.10. Makes .venvs/mosaic the first time (20 s). Where this machine has no
# Python >= 3.12, prints a line that says so and exits with status 0.
#
#   bash scripts/mosaic_tests.sh [arguments of pytest]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venvs/mosaic"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 JAX_PLATFORMS=cpu
unset PYTHONPATH PYTHONHOME

if ! python="$(bash "$root/scripts/find_python312.sh")"; then
  echo "skipped: the Mosaic GPU kernels' tests need JAX 0.11, which needs Python >= 3.12, and none was found"
  exit 0
fi
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
constraints="$root/scripts/constraints-$version.txt"
[ "$version" = 3.12 ] || constraints=/dev/null # the other files have other versions of JAX
packages=(jax==0.11.2 jaxlib==0.11.2 absl-py jaxtyping beartype "pytest>=9,<10" "pytest-xdist>=3.6,<4" hypothesis)
wanted="$version ${packages[*]} $(cksum <"$constraints")"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --no-compile --constraint "$constraints" "${packages[@]}"
  echo "$wanted" >"$venv/.installed"
fi
cd "$root"
exec "$venv/bin/python" -m pytest -q -n 2 --dist worksteal -p no:cacheprovider \
  tests/pallas_kernels/test_{mosaic,latent_mosaic,broken_kernels,kernels}.py -k mosaic "$@"
