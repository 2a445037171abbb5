#!/usr/bin/env bash
# Format, lint, types, import contracts, tests, and without arguments the Mosaic GPU kernels' tests on JAX 0.11 where there
# is a Python >= 3.12. Runs every step, then names the ones that failed.
#
#   bash scripts/check.sh [arguments of pytest, such as -k scheduler or -m slow]
#
# PYTHON chooses the environment (default: .venv at the repository root, which scripts/test.sh makes).
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="${PYTHON:-$root/.venv/bin/python}"
if ! "$python" -c 'import pytest, ruff, pyright, importlinter' 2>/dev/null; then
  echo "error: $python has no dev extra; run scripts/test.sh, or set PYTHON to an environment that has it" >&2
  exit 2
fi
failed=()

step() {
  local name="$1" began=$SECONDS
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
  echo "   ($name: $((SECONDS - began)) s)"
}

step "ruff format" "$python" -m ruff format --check --quiet --diff .
step "ruff lint" "$python" -m ruff check --quiet .
step "pyright" "$python" -m pyright --pythonpath "$python"
step "import contracts" "$(dirname "$python")/lint-imports" --no-logo
step "pytest" "$python" -m pytest -q -n 2 --dist loadfile "$@"
# The Mosaic GPU kernels' tests need JAX 0.11: where this environment has another one, they were skipped above.
if [ $# = 0 ] && "$python" -c 'import jax, sys; sys.exit(jax.__version_info__[:2] == (0, 11))'; then
  step "Mosaic GPU kernels on JAX 0.11" bash "$root/scripts/mosaic_tests.sh"
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "All checks passed"
