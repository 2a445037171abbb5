#!/usr/bin/env bash
# The whole gate in the repository's own environment: .venv with the extras dev, clients, otel, research and ray, then
# scripts/check.sh.
#
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/make_venv.sh" dev,clients,otel,research,ray
PYTHON="$root/.venv/bin/python" exec bash "$root/scripts/check.sh" "$@"
