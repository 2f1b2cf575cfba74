#!/usr/bin/env bash
# Packs the sources, builds a labelled wheel from the pack alone, installs it in an environment of its
# own beside the torch of $PYTHON, and saves and loads with it there.
set -euo pipefail
cd "$(dirname "$0")/.."
use="$PWD/scripts/use_package.py"

python="$(realpath -s "${PYTHON:-.venv/bin/python}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# From a copy: what packing leaves beside setup.py is not for the tree.
mkdir "$work/tree"
tar cf - --exclude=./build --exclude=./.git --exclude='./.venv*' --exclude='*.so' . |
  tar xf - -C "$work/tree"
(cd "$work/tree" && "$python" setup.py --quiet sdist --dist-dir "$work/dist" 2>/dev/null)
(cd "$work" && PYCKPT_LABEL=1 "$python" -m pip wheel --quiet --no-build-isolation --no-deps \
  --no-cache-dir --wheel-dir "$work/wheels" "$work"/dist/*.tar.gz)

# Torch and what it needs are found where they are; pyckpt is not taken from there, since packages of
# one's own come first.
"$python" -m venv --without-pip "$work/venv"
elsewhere="$work/venv/bin/python"
site="$("$elsewhere" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/torch.pth"
"$python" -m pip --python "$elsewhere" install --quiet --no-index --no-deps "$work"/wheels/*.whl

cd "$work"
env -u PYTHONPATH "$elsewhere" "$use" labelled
