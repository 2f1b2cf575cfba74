#!/usr/bin/env bash
# Compiles and links the extension with CUDA, in .venv-cuda, on a machine that need not have a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"
if [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
  echo "no CUDA toolkit at CUDA_HOME=$CUDA_HOME: the CUDA build was not checked" >&2
  # Where nothing may be skipped, this is a failure.
  [ "${PYCKPT_REQUIRE_ALL:-0}" = 1 ] && exit 1
  exit 0
fi

venv=.venv-cuda
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.version.cuda is None)" 2>/dev/null; then
  "$venv/bin/python" -m pip install --quiet --upgrade pip
  "$venv/bin/python" -m pip install --quiet "${TORCH_CUDA:-torch==2.11.0}"
  "$venv/bin/python" -m pip install --quiet "setuptools>=77" wheel ninja
fi

# From a copy, so that the CPU build in the tree stays as it is.
copy=build/cuda
mkdir -p "$copy"
rm -rf "$copy/csrc" "$copy/pyckpt"  # of another version, with sources that are gone since
cp -rp csrc pyckpt setup.py pyproject.toml README.md LICENSE "$copy/"
rm -f "$copy"/pyckpt/_C*.so
(cd "$copy" && PYCKPT_CUDA=1 "../../$venv/bin/python" setup.py --quiet build_ext --inplace)

# All symbols resolve, and the module says that it has CUDA.
cd "$copy"
"../../$venv/bin/python" - <<'PY'
import ctypes
from pathlib import Path

import torch

[extension] = Path("pyckpt").glob("_C*.so")
ctypes.CDLL(str(extension.resolve()), mode=ctypes.RTLD_GLOBAL | 2)  # RTLD_NOW
import pyckpt

assert pyckpt._C.cuda
print(f"built against torch {torch.__version__}, CUDA {torch.version.cuda}: {extension.name}")
PY

# With torch's own code for devices and without a GPU: no context where the program has none.
read -r torch runtime < <("../../$venv/bin/python" - <<'PY'
import os

import torch

# Where the runtime lies that torch loads.
with open("/proc/self/maps") as maps:
    [runtime] = {line.split()[-1] for line in maps if "/libcudart.so" in line}
print(os.path.dirname(torch.__file__), os.path.dirname(runtime))
PY
)
"${CXX:-g++}" -std=c++17 -DPYCKPT_CUDA -Wall -Wextra -Werror -pthread -Icsrc \
  -isystem "$torch/include" -isystem "$CUDA_HOME/include" \
  ../../tests/native/torch/current_device.cpp -o current_device \
  -L"$torch/lib" -lc10_cuda -lc10 -Wl,-rpath,"$torch/lib:$runtime" -Wl,-rpath-link,"$runtime"
./current_device
echo "no context on a device that is not used"
