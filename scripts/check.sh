#!/usr/bin/env bash
# Format, lint, types, import contracts and tests. Runs every step, then names the ones that failed.
#
#   bash scripts/check.sh                   the gate: everything but slow tests
#   bash scripts/check.sh --fast            format, lint, types, import contracts, and the tests that start no engine
#   bash scripts/check.sh --slow-quarter    the quarter of the slow tests that is due at this commit, alone
#   bash scripts/check.sh -k scheduler      these tests alone; any other arguments are passed to pytest too
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
# Dozens of processes import the same modules: without their bytecode, each would compile JAX and transformers again.
unset PYTHONDONTWRITEBYTECODE
failed=()

step() { # name, command...
  local name="$1" began=$SECONDS
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
  echo "   ($name: $((SECONDS - began)) s)"
}

run_pytest() {
  "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@" # tests/suite.py orders the files
}

# Everything but tests. Pyright, which uses one core for two minutes, runs beside them: finish_source waits for it.
check_source() { # the command that starts pyright, such as nice
  step "ruff format" "$python" -m ruff format --check --quiet --diff .
  step "ruff lint" "$python" -m ruff check --quiet .
  step "import contracts" "$(dirname "$python")/lint-imports" --no-logo
  types="$(mktemp)"
  "$@" "$python" -m pyright --pythonpath "$python" >"$types" 2>&1 </dev/null &
  pyright=$!
}

finish_source() {
  step "pyright" wait "$pyright"
  cat "$types" && rm "$types"
}

# The Mosaic GPU kernels' tests need JAX 0.11: where this environment has another one, pytest skips them.
begin_mosaic() {
  mosaic=
  if "$python" -c 'import jax, sys; sys.exit(jax.__version_info__[:2] == (0, 11))'; then
    kernels="$(mktemp)"
    "$@" bash "$root/scripts/mosaic_tests.sh" >"$kernels" 2>&1 </dev/null &
    mosaic=$!
  fi
}

finish_mosaic() {
  [ -n "$mosaic" ] || return 0
  step "Mosaic GPU kernels on JAX 0.11" wait "$mosaic"
  cat "$kernels" && rm "$kernels"
}

finish() {
  if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}"
    exit 1
  fi
  echo "All checks passed"
}

case "${1:-}" in
"")
  # At the lowest priority: a fifth of the time the tests wait, for servers to start or limits to pass.
  check_source nice -n 19
  begin_mosaic nice -n 19
  step "pytest" run_pytest
  finish_source
  finish_mosaic
  ;;
--fast)
  shift
  check_source env
  step "pytest --fast" run_pytest --fast "$@"
  finish_source
  ;;
--slow-quarter)
  shift
  num_commits="$(git rev-list --count HEAD 2>/dev/null)" || num_commits=0 # a copy without its history has quarter 0
  quarter=$((num_commits % 4))
  step "pytest -m slow, quarter $quarter" run_pytest -m slow --slow-quarter "$quarter" "$@"
  ;;
*)
  run_pytest "$@"
  exit
  ;;
esac
finish
