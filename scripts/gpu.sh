#!/usr/bin/env bash
# Everything that takes a GPU, step by step: see README.md beside this file.
#
#   scripts/gpu.sh [--cpu] [--within SECONDS] [STEP...]
#
#   PYTHON=python3       which python; it has torch with CUDA
#   RESULTS=dir          where the results go (default: benchmarks/results)
#   PYCKPT_COMMIT=hash   what to call the commit, in a copy of the tree without its history
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_steps.py "$@"
