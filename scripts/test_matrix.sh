#!/usr/bin/env bash
# Runs the tests on each pair of Python and JAX that this machine can have, and prints a table.
#
#   bash scripts/test_matrix.sh --list                 the pairs, and which Python each would use
#   bash scripts/test_matrix.sh [--only TEXT] [arguments of pytest]
#
# --only keeps the pairs whose name contains TEXT, such as 3.12. Pythons are searched on PATH and in ~/.pyenv/versions.
# Each pair has its own environment under .venvs/, kept for the next run; "newest" is upgraded at each run.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
pairs=("3.11 0.10.2" "3.12 0.11.2" "3.12 newest" "3.13 newest")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME

find_python() { # version -> the first interpreter of that version
  local candidate
  for candidate in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
    if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

install() { # python, venv, JAX version or "newest"
  local constraints
  constraints="$root/scripts/constraints-$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt"
  [ -x "$2/bin/python" ] || "$1" -m venv "$2" || return
  if [ "$3" = newest ]; then
    "$2/bin/python" -m pip install --quiet --upgrade --upgrade-strategy eager --editable "$root[dev]"
  else
    "$2/bin/python" -m pip install --quiet --constraint "$constraints" --editable "$root[dev]" "jax==$3" "jaxlib==$3"
  fi
}

run_pair() { # name, python, venv, JAX version, pytest arguments... -> one line of the table in $result
  local name="$1" python="$2" venv="$3" jax="$4" log="$3.log" began=$SECONDS
  shift 4
  if ! install "$python" "$venv" "$jax" >"$log" 2>&1; then
    result="could not install, see $log"
    return 1
  fi
  (cd "$root" && "$venv/bin/python" -m pytest -q -n 2 --dist loadfile -p no:cacheprovider "$@") </dev/null 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]}
  jax="$("$venv/bin/python" -c 'from importlib.metadata import version; print("jax", version("jax"), "flax", version("flax"))')"
  result="$jax: $(tail -n 1 "$log" | tr -d '=') [$((SECONDS - began)) s]"
  return "$status"
}

only="" list=false
case "${1:-}" in
--list) list=true ;;
--only)
  only="${2:?--only needs a text}"
  shift 2
  ;;
esac

table=() exit_status=0
for pair in "${pairs[@]}"; do
  read -r version jax <<<"$pair"
  name="py$version-jax$jax"
  [[ "$name" == *"$only"* ]] || continue
  if ! python="$(find_python "$version")"; then
    table+=("absent  $name  no Python $version on this machine")
  elif $list; then
    table+=("found   $name  $python")
  else
    echo "== $name ($python)"
    mkdir -p "$root/.venvs"
    result=""
    if run_pair "$name" "$python" "$root/.venvs/$name" "$jax" "$@"; then
      table+=("passed  $name  $result")
    else
      table+=("FAILED  $name  $result")
      exit_status=1
    fi
  fi
done
if [ ${#table[@]} -eq 0 ]; then
  echo "error: no pair's name contains \"$only\"; --list shows them" >&2
  exit 2
fi
printf '%s\n' "${table[@]}"
exit $exit_status
