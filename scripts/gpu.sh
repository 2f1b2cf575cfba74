#!/usr/bin/env bash
# Everything that takes a GPU: the build against the torch of $PYTHON, tests, sanitizers, benchmark.
# Installs nothing. Fails where there is no GPU.
#
#   PYTHON=python3       which python; it has torch with CUDA
#   RESULTS=dir          where the benchmark's results go (default: benchmarks/results)
#   PYCKPT_COMMIT=hash   what to call the commit, in a copy of the tree without its history
set -uo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
results="${RESULTS:-benchmarks/results}"
if ! capability="$("$python" -c '
import torch
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} finds no GPU")
print("%d.%d" % torch.cuda.get_device_capability())
')"; then
  echo "make gpu needs a GPU, and $python a torch with CUDA: nothing was run" >&2
  exit 1
fi
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-$capability}"
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
export PYCKPT_CUDA=1
export PYTHONUNBUFFERED=1
nvcc="$CUDA_HOME/bin/nvcc"
[ -x "$nvcc" ] || nvcc="$(command -v nvcc)" || {
  echo "make gpu needs nvcc: CUDA_HOME=$CUDA_HOME has none" >&2
  exit 1
}

failed=()
# step <name> <seconds at most> <command...>
step() {
  local name="$1" limit="$2" start="$SECONDS"
  shift 2
  echo "== $name"
  if timeout "$limit" "$@"; then
    echo "== $name: passed in $((SECONDS - start)) s"
  else
    echo "== $name: FAILED ($?) after $((SECONDS - start)) s"
    failed+=("$name")
  fi
}

step build 240 "$python" setup.py --quiet build_ext --inplace --force
if [ "${#failed[@]}" -gt 0 ]; then
  exit 1
fi

step tests 150 "$python" scripts/gpu_tests.py -q

# The kernel alone, without torch, so that a sanitizer is through with it in seconds.
check_pack=build/check_pack
mkdir -p build
step "check of the pack kernel" 60 bash -c "
  '$nvcc' -std=c++17 -lineinfo -arch=sm_${capability/./} -Icsrc \
    csrc/pack.cu csrc/pack_small.cu csrc/pack_cuda.cpp tests/native/check_pack.cu -o '$check_pack' && '$check_pack'"
sanitizer="$(command -v compute-sanitizer || true)"
[ -n "$sanitizer" ] || sanitizer="$CUDA_HOME/bin/compute-sanitizer"
if [ ! -x "$sanitizer" ]; then
  echo "== compute-sanitizer is not installed: NOT RUN"
elif ! "$sanitizer" --tool memcheck "$check_pack" 1 2>&1 | grep -q "ERROR SUMMARY: 0 errors"; then
  # Some virtual machines show a GPU that it refuses; an error of ours shows below, too.
  if "$sanitizer" --tool memcheck "$check_pack" 1 2>&1 | grep -q "Device not supported"; then
    echo "== compute-sanitizer refuses this device: NOT RUN"
  else
    step "compute-sanitizer memcheck" 60 "$sanitizer" --error-exitcode 1 "$check_pack" 1
  fi
else
  for tool in memcheck racecheck initcheck synccheck; do
    step "compute-sanitizer $tool" 60 "$sanitizer" --tool "$tool" --error-exitcode 1 "$check_pack"
  done
fi

# What is left of eight minutes.
left=$((480 - SECONDS - 15))
[ "$left" -gt 60 ] || left=60
step benchmark "$((left + 60))" "$python" benchmarks/gpu.py \
  --minutes "$("$python" -c "print($left * 0.9 / 60)")" --results "$results"

if [ "${#failed[@]}" -gt 0 ]; then
  printf '== FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all passed in $SECONDS s"
