#!/usr/bin/env bash
# Format, lint, types, import contracts, tests. Runs every step, then names the ones that failed.
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

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "All checks passed"
