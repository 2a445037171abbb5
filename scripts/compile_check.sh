#!/usr/bin/env bash
# Makes .venvs/cuda with JAX's CUDA wheels (5 GB, once) and runs scripts/compile_check.py there: no card is needed.
#
#   bash scripts/compile_check.sh [arguments of compile_check.py]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venvs/cuda"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

if ! [ -f "$venv/.installed" ]; then
  python="$(bash "$root/scripts/find_python312.sh")" || { echo "error: no Python >= 3.12 found" >&2; exit 2; }
  "$python" -m venv --clear "$venv"
  version="$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  constraints="$root/scripts/constraints-$version.txt"
  [ -f "$constraints" ] || constraints=/dev/null
  "$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable "$root[dev,cuda13]"
  touch "$venv/.installed"
fi
exec "$venv/bin/python" "$root/scripts/compile_check.py" "$@"
