#!/usr/bin/env bash
# The commands of a first run on an NVIDIA GPU, in order. Each takes at most 9 minutes, can be killed at any time, and
# writes a JSON file and a Markdown table of its results; later ones continue from the files of earlier ones.
#
#   bash scripts/gpu_first_run.sh wheels   on a machine with a package index: fetch what the GPU machine lacks
#   bash scripts/gpu_first_run.sh 1        ceilings, and the smallest case of every implementation (4 minutes at most)
#   bash scripts/gpu_first_run.sh 2        numerics, then kernels
#   bash scripts/gpu_first_run.sh 3        the engine end to end
#   bash scripts/gpu_first_run.sh 4        XLA's tuning, matrix multiplications, drafts and peers, if there is time left
#   bash scripts/gpu_first_run.sh          all four, one after the other
#
# Further arguments go to scripts/gpu_check.py, such as --retry-failed after a fix, or --commit where git is missing.
# The files are copied to $OUT, or to scripts/gpu_results where that is not set. PYTHON names the interpreter (default:
# python3). Wheels in build/wheels are unpacked beside it, not installed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="${PYTHON:-python3}"
wheels=build/wheels
results=build/gpu_check/results
name=first_run

fetch_wheels() { # of Python 3.12 on x86-64 Linux; jax-triton requires a newer Triton than it needs, so without dependencies
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_39_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$wheels" "llguidance>=1.9,<2" jax-triton==0.4.1
  ls "$wheels"
}

keep_results() {
  local target="${OUT:-scripts/gpu_results}"
  mkdir -p "$target"
  cp "$results/$name".json "$results/$name".md "$target"/ 2>/dev/null || echo "there are no results to keep yet" >&2
}

check() { # time limit, parts, arguments of gpu_check.py
  local limit="$1" parts="$2"
  shift 2
  # The check stops before its limit; if it does not, it gets SIGTERM, and SIGKILL 10 seconds later.
  timeout --kill-after=10 "$((limit + 20))" "$python" scripts/gpu_check.py --only "$parts" --time-limit "$limit" \
    --name "$name" --output "$results" "$@"
}

stage() { # number, arguments of gpu_check.py
  local number="$1"
  shift
  case "$number" in
  1) check 220 probe "$@" ;; # starts anew: no --resume
  2) check 505 numerics,kernels --resume "$@" ;;
  3) check 505 engine --resume "$@" ;;
  4) check 505 compile,gemms,drafts,peers --resume "$@" ;;
  *)
    echo "error: unknown stage '$number'; stages: wheels, 1, 2, 3, 4" >&2
    return 2
    ;;
  esac
}

first="${1:-all}"
[ $# = 0 ] || shift
if [ "$first" = wheels ]; then
  fetch_wheels
  exit
fi
if [ -d "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/site "$wheels"/*.whl
  export PYTHONPATH="$root/build/site${PYTHONPATH:+:$PYTHONPATH}"
fi
trap keep_results EXIT
if [ "$first" != all ]; then
  stage "$first" "$@"
  exit
fi
status=0
for number in 1 2 3 4; do # failures are in the files; continue with the next stage
  stage "$number" "$@" || status=$?
done
exit "$status"
