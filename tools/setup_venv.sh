#!/bin/sh
# Creates the virtual environment $1 with the package and its extras $2 (may be empty). It is quick if nothing changed.
set -eu
cd "$(dirname "$0")/.."
venv=$1
extras=${2:-}

fail() {
  echo "alignedserve: error: $*" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || fail "only Linux is supported, this is $(uname -s); use a Linux machine, a container or WSL 2"

find_python() {
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer with the venv module is needed (Debian: apt-get install python3 python3-venv)"
}

# A hash of the inputs. If it is unchanged, there is nothing to do.
key=$(cat pyproject.toml setup.py constraints.txt tools/setup_venv.sh | sha256sum | cut -c1-16)
stamp=$venv/.alignedserve-${extras:-base}
[ "$(cat "$stamp" 2>/dev/null || true)" = "$key" ] && exit 0

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "creating $venv with $($python --version)"
  "$python" -m venv "$venv" || fail "the virtual environment cannot be created (Debian: apt-get install python3-venv)"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"
torch=$(sed -n 's/^torch==//p' constraints.txt)

has_gpu() {
  [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]
}

uv_install() {
  "$venv/bin/uv" pip install -q --compile-bytecode --python "$venv/bin/python" -c constraints.txt "$@"
}

# uv takes less than half of pip's time. Where it cannot install, pip does: its configuration may name other indexes.
install() {
  uv_install "$@" && return
  echo "uv cannot install this, see above; pip tries"
  $pip install -q -c constraints.txt "$@"
}

install_torch() {
  if has_gpu; then
    install "torch==$torch"  # the CUDA build
  elif ! $pip install -q "torch==$torch+cpu" 2>/dev/null; then
    uv_install --torch-backend=auto "torch==$torch"  # uv knows the index of the CPU build
  fi
}

echo "installing alignedserve${extras:+[$extras]} and its dependencies into $venv (some minutes the first time)"
$pip install -q -c constraints.txt setuptools uv wheel
"$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || install_torch
wanted=$extras
if has_gpu; then  # NCCL, CuPy and CUDA bindings for torch's CUDA version
  cuda=$("$venv/bin/python" -c 'import torch; print((torch.version.cuda or "").partition(".")[0])')
  wanted=${extras:+$extras,}${cuda:+gpu-cu$cuda}
fi
install --no-build-isolation -e ".${wanted:+[$wanted]}"
echo "$key" > "$stamp"
