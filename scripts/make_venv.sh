#!/usr/bin/env bash
# Makes .venv at the repository root and installs the project into it, editable.
#
#   bash scripts/make_venv.sh            what running the engine needs
#   bash scripts/make_venv.sh dev        the same plus an extra of pyproject.toml, or several: dev,otel
#   bash scripts/make_venv.sh --require-hashes    what running needs, only with the hashes of scripts/hashes-VERSION.txt
#
# Does nothing, in well under a second, when .venv already has what pyproject.toml and the constraints file require.
# PYTHON=/path/to/python chooses the interpreter of a new .venv; otherwise the first Python >= 3.11 found is taken.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
extra="${1:-}"
hashed=false
if [ "$extra" = --require-hashes ]; then
  hashed=true extra=
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME

is_python_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python \
    "$HOME"/.pyenv/versions/3.1[1-9].*/bin/python; do
    if is_python_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
    if [ "$candidate" = "${PYTHON:-}" ]; then
      echo "error: PYTHON=$PYTHON is not a Python >= 3.11 that runs here" >&2
      return 1
    fi
  done
  echo "error: jaxserve needs Python >= 3.11. Looked for python3, python3.11 to python3.14, python and pyenv's versions;" \
    "python3 here is: $(python3 --version 2>/dev/null || echo absent)." \
    "Install one, or name it: PYTHON=/path/to/python bash scripts/quickstart.sh" >&2
  return 1
}

create_venv() {
  local python
  python="$(find_python)"
  echo "Creating .venv with $("$python" --version)"
  if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
  else # Debian's python3 without python3-venv: pip can install itself into the new environment.
    "$python" -m venv --clear --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install --quiet pip || {
      echo "error: $python has neither ensurepip nor a pip >= 22.3; on Debian: apt install python3-venv" >&2
      return 1
    }
  fi
}

is_venv_whole() { # False too when a run before this one was stopped while it made the environment.
  is_python_new_enough "$venv/bin/python" &&
    "$venv/bin/python" -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("pip") is None)'
}

if ! is_venv_whole; then
  create_venv
fi

version="$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
constraints="$root/scripts/constraints-$version.txt"
[ -f "$constraints" ] || constraints=/dev/null

hashes="$root/scripts/hashes-$version.txt"
if $hashed && [ ! -f "$hashes" ]; then
  echo "error: there are no hashes for Python $version (scripts/hashes-$version.txt); scripts/pin_hashes.py writes them" >&2
  exit 1
fi

# One stamp for each extra: what was requested, and where, when its last installation succeeded. And one for the
# native kernels, which all extras share: an installation builds them into the tree.
stamp="$venv/.installed-${extra:-core}"
if $hashed; then
  stamp="$venv/.installed-hashed"
  if [ -f "$venv/.installed-core" ]; then
    echo "error: .venv has packages that were installed without hashes; remove it first" >&2
    exit 1
  fi
fi
native_stamp="$venv/.installed-native"
wanted="$root $version $(cat "$root/pyproject.toml" "$constraints" | cksum)"
if $hashed; then wanted="$wanted $(cksum <"$hashes")"; fi
wanted_native="$(cat "$root/setup.py" "$root"/pallas_kernels/native/*.{c,h,py} | cksum)"
has_library=true
[ "$(uname -sm)" != "Linux x86_64" ] || [ -f "$root/pallas_kernels/libjaxserve_native.so" ] || has_library=false
if $has_library && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] &&
  [ "$(cat "$native_stamp" 2>/dev/null)" = "$wanted_native" ]; then
  exit 0
fi

echo "Installing jaxserve${extra:+ with the extra \"$extra\"} into .venv (a few minutes the first time)"
if [ "$constraints" = /dev/null ]; then
  echo "There is no tested set of versions for Python $version (scripts/constraints-$version.txt): taking the newest allowed"
fi
# Modules are compiled when first imported; most of what the extras bring never is.
if $hashed; then
  "$venv/bin/python" -m pip install --quiet --no-compile --no-deps --require-hashes --requirement "$hashes"
  "$venv/bin/python" -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable "$root"
else
  "$venv/bin/python" -m pip install --quiet --no-compile --constraint "$constraints" --editable "$root${extra:+[$extra]}"
  echo "$wanted" >"$venv/.installed-core"
fi
echo "$wanted" >"$stamp"
echo "$wanted_native" >"$native_stamp"
