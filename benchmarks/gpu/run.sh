#!/bin/sh
# The whole check on a machine with one NVIDIA GPU, in one call of under ten minutes; nothing is installed or fetched.
#   benchmarks/gpu/run.sh [--only GROUP[,GROUP]] [--out DIR] [--quick] [--list] [--device cpu]
# $OUT, where it is set, is the folder that results.json, table.md and the logs go to; PYTHON is the interpreter.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tools/pkgview.sh"
PYTHONPATH="$root/.pkgview:$root/benchmarks/gpu:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
HF_HUB_OFFLINE=1
TOKENIZERS_PARALLELISM=false
export PYTHONPATH PYTHONUNBUFFERED HF_HUB_OFFLINE TOKENIZERS_PARALLELISM
cd "$root"
exec "${PYTHON:-python3}" -m gpu_suite "$@"
