#!/usr/bin/env bash
# Prints the first Python >= 3.12 of this machine; status 1 where there is none. JAX 0.11 needs one.
for python in python3.12 python3.13 python3.14 python3 "$HOME"/.pyenv/versions/3.1[234].*/bin/python; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    command -v "$python"
    exit 0
  fi
done
exit 1
