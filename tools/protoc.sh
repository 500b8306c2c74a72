#!/bin/sh
# Regenerates proto/messages with the oldest supported generator, in its own virtual environment.
set -eu
cd "$(dirname "$0")/.."
venv=${PROTOC_VENV:-.venv-protoc}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import grpc_tools' 2>/dev/null || "$venv/bin/pip" install -q grpcio-tools==1.72.2 'setuptools<81'
tools/pkgview.sh
"$venv/bin/python" -m grpc_tools.protoc -I alignedserve/proto=proto --python_out=.pkgview --pyi_out=.pkgview \
  --grpc_python_out=.pkgview proto/*.proto
