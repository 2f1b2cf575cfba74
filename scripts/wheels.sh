#!/usr/bin/env bash
# Wheels for a release: for each torch that is named, one a Python. Takes Docker and cibuildwheel.
#
#     scripts/wheels.sh [--list] [TORCH:KIND ...]     KIND: cpu, or cu and a CUDA without its point
#
# They come to lie in dist/wheels, side by side: their versions say what each is for. --list only tells
# what would be built. What is the same for all is in pyproject.toml, [tool.cibuildwheel].
set -euo pipefail
cd "$(dirname "$0")/.."

what=(--output-dir dist/wheels)
if [ "${1:-}" = --list ]; then
  what=(--print-build-identifiers)
  shift
fi
# The minor releases of torch, each without CUDA and with the CUDA of the torch on PyPI.
all=(
  2.9.1:cpu 2.9.1:cu128
  2.10.0:cpu 2.10.0:cu128
  2.11.0:cpu 2.11.0:cu130
  2.12.1:cpu 2.12.1:cu130
  2.13.0:cpu 2.13.0:cu130
  2.14.1:cpu 2.14.1:cu130
  2.15.0:cpu 2.15.0:cu132
)
[ "$#" -gt 0 ] || set -- "${all[@]}"

export PYCKPT_LABEL=1
for entry in "$@"; do
  torch=${entry%%:*} kind=${entry#*:}
  echo "== torch $torch, $kind"
  export PYCKPT_TORCH=$torch
  unset CIBW_SKIP
  case $torch in
    2.15.*) export CIBW_SKIP="*-musllinux_* cp310-*" ;;  # it has no wheels for Python 3.10
  esac
  # PyPI has one kind of each torch. This has them all, as 2.13.0+cpu and so on, and pip prefers a
  # version with a label to one without.
  export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/$kind
  case $kind in
    cpu)
      export PYCKPT_CUDA=0 CIBW_BEFORE_ALL=
      ;;
    cu[0-9]*)
      cuda=${kind#cu}
      major=${cuda%?} minor=${cuda: -1}
      export PYCKPT_CUDA=1 CUDA_HOME=/usr/local/cuda-$major.$minor
      repository=https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
      export CIBW_BEFORE_ALL="dnf install -y dnf-plugins-core \
        && dnf config-manager --add-repo $repository \
        && dnf install -y cuda-nvcc-$major-$minor cuda-cudart-devel-$major-$minor"
      ;;
    *)
      echo "$entry is no TORCH:KIND, such as 2.13.0:cpu or 2.11.0:cu130" >&2
      exit 1
      ;;
  esac
  cibuildwheel --platform linux "${what[@]}" .
done
