#!/usr/bin/env bash
# Writes the Python modules of jaxserve/server/proto/**/*.proto beside them, with the oldest supported tools: code that they
# generate runs with every later protobuf up to the next major version. Makes .venvs/protos the first time.
#
#   bash scripts/make_protos.sh
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venvs/protos"
if [ ! -f "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "grpcio-tools==1.81.1" "protobuf==6.33.5"
  touch "$venv/.installed"
fi
cd "$root/jaxserve/server/proto"
find jaxserve -name '*_pb2*.py*' -delete
files=(jaxserve/v1/*.proto)
"$venv/bin/python" -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. --grpc_python_out=. "${files[@]}"
# The modules are in this package, not at the top level.
sed -i -E 's/^from jaxserve\.v1 import/from jaxserve.server.proto.jaxserve.v1 import/' jaxserve/v1/*_pb2*.py*
# Files without services need no _grpc module.
for file in jaxserve/v1/*_pb2_grpc.py; do
  grep -q '^class .*Stub' "$file" || rm "$file"
done
