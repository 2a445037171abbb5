#!/usr/bin/env bash
# From a fresh clone to generated text: creates .venv, installs, and generates completions of several prompts with the embedded demo model
# that are decoded together. Prints the texts with tokens/s, and where the memory went. The second run takes seconds.
#
#   bash scripts/quickstart.sh [arguments of "jaxserve generate", such as --json]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/make_venv.sh"
exec "$root/.venv/bin/jaxserve" generate --model demo --prompts "$root/scripts/demo_prompts.txt" \
  --temperature 0 --max-tokens 32 --max-num-seqs 8 --max-num-batched-tokens 256 "$@" </dev/null
