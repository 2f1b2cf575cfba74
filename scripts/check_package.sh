#!/usr/bin/env bash
# Packs the sources, builds a wheel from the pack alone, installs it in an environment of its own
# beside the torch of $PYTHON, and saves and loads with it there.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$(realpath -s "${PYTHON:-.venv/bin/python}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# From a copy: what packing leaves beside setup.py is not for the tree.
mkdir "$work/tree"
tar cf - --exclude=./build --exclude=./.git --exclude='./.venv*' --exclude='*.so' . |
  tar xf - -C "$work/tree"
(cd "$work/tree" && "$python" setup.py --quiet sdist --dist-dir "$work/dist" 2>/dev/null)
(cd "$work" && "$python" -m pip wheel --quiet --no-build-isolation --no-deps --no-cache-dir \
  --wheel-dir "$work/wheels" "$work"/dist/*.tar.gz)

# Torch and what it needs are found where they are; pyckpt is not taken from there, since packages of
# one's own come first.
"$python" -m venv --without-pip "$work/venv"
elsewhere="$work/venv/bin/python"
site="$("$elsewhere" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/torch.pth"
"$python" -m pip --python "$elsewhere" install --quiet --no-index --no-deps "$work"/wheels/*.whl

cd "$work"
env -u PYTHONPATH "$elsewhere" - <<'PY'
import importlib.metadata
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp

import pyckpt

assert pyckpt.__file__.startswith(sys.prefix), pyckpt.__file__
minor = ".".join(torch.__version__.split(".")[:2])
requires = importlib.metadata.requires("pyckpt") or []
assert f"torch=={minor}.*" in requires, requires
state = {"weight": torch.arange(1000.0)}
with tempfile.TemporaryDirectory() as path:
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    found = {"weight": torch.zeros(1000)}
    pyckpt.load(found, path)
assert torch.equal(found["weight"], state["weight"])
print(f"the wheel of the packed sources works, with torch {torch.__version__}")
PY
