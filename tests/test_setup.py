"""Installing: what is packed, what a wheel asks for, and what is said where nothing can be built.

That a wheel is built from the packed sources, and works where it is installed, takes minutes:
scripts/check_package.sh sees to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
[VERSION] = re.findall(r'^VERSION = "(.+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what setup.py looks at; it writes beside itself."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copy(ROOT / "pyckpt_pytest.py", tree)
    without = shutil.ignore_patterns("*.so", "__pycache__", "_build.py")
    for name in ("csrc", "pyckpt"):
        shutil.copytree(ROOT / name, tree / name, ignore=without)
    return tree


def setup(
    tree: Path, *arguments: object, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.py, after some other code."""
    code = f"""
import runpy, sys
{before}
sys.argv = ["setup.py", *{[str(argument) for argument in arguments]!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "PYCKPT_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )


def metadata_of(tree: Path, where: Path, before: str = "", **environment: str) -> str:
    """Of the wheel that would be built."""
    where.mkdir(exist_ok=True)
    done = setup(tree, "-q", "dist_info", "--output-dir", where, before=before, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    [metadata] = where.rglob("METADATA")
    return metadata.read_text()


def version_of(metadata: str) -> str:
    [line] = [line for line in metadata.splitlines() if line.startswith("Version: ")]
    return line.removeprefix("Version: ")


def required(metadata: str) -> str:
    """Of torch, without extras."""
    lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")]
    [line] = [line for line in lines if "extra" not in line]
    return line.removeprefix("Requires-Dist: ")


@pytest.mark.slow
def test_the_sources_are_packed_whole_and_ask_for_any_torch(tree: Path, tmp_path: Path) -> None:
    (tree / "pyckpt" / "_build.py").write_text("torch_version = 'of another build'")
    done = setup(tree, "-q", "sdist", "-d", tmp_path / "dist", before="sys.modules['torch'] = None")
    assert done.returncode == 0, done.stdout + done.stderr
    [packed] = (tmp_path / "dist").iterdir()
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        [information] = [n for n in archive.getnames() if n.count("/") == 1 and "PKG-INFO" in n]
        file = archive.extractfile(information)
        assert file is not None
        assert required(file.read().decode()) == "torch>=2.9"
    sources = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "pyckpt").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed") and path.name != "_build.py"
    }
    assert sources | package | {"pyckpt_pytest.py", "setup.py", "pyproject.toml"} <= names
    assert "pyckpt/_build.py" not in names


@pytest.mark.slow
def test_a_wheel_asks_for_the_minor_release_that_it_was_built_with(
    tree: Path, tmp_path: Path
) -> None:
    metadata = metadata_of(tree, tmp_path / "info")
    assert required(metadata) == f"torch=={MINOR}.*"
    assert version_of(metadata) == VERSION
    # What the extension was built against is known to who builds it.
    assert not (tree / "pyckpt" / "_build.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cu130"])
def test_a_label_says_what_a_wheel_was_built_for(tree: Path, tmp_path: Path, kind: str) -> None:
    if kind == "cpu":  # whatever CUDA torch has
        environment = {"PYCKPT_CUDA": "0"}
    else:
        home = fake_toolkit(tmp_path / "toolkit", "13.0")
        environment = {"PYCKPT_CUDA": "1", "CUDA_HOME": str(home)}
    before = "import torch; torch.version.cuda = '13.0'"
    metadata = metadata_of(tree, tmp_path / "info", before, PYCKPT_LABEL="1", **environment)
    assert version_of(metadata) == f"{VERSION}+torch{MINOR}.{kind}"
    assert required(metadata) == f"torch=={MINOR}.*"


NO_TORCH = "sys.modules['torch'] = None"
OLD_TORCH = "import torch; torch.__version__ = '2.8.1+cpu'"
OLD_SETUPTOOLS = "import setuptools; setuptools.__version__ = '65.5.0'"
NO_HEADERS = "import sysconfig; sysconfig.get_path = lambda *_: '/nowhere'"
OTHER_CUDA = "import torch; torch.version.cuda = '99.0'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environment", "says"),
    [
        (OLD_SETUPTOOLS, {}, 'setuptools 65.5.0 is too old. Run: pip install "setuptools>=77"'),
        (NO_TORCH, {}, "Install torch 2.9 or later"),
        (OLD_TORCH, {}, "torch 2.8.1+cpu is older than 2.9"),
        (NO_HEADERS, {}, "apt-get install python3-dev"),
        ("", {"CXX": "none++ -O3"}, "no C++ compiler 'none++ -O3'. Install one"),
        ("", {"PATH": "/nowhere", "CXX": ""}, "no C++ compiler 'c++'. Install one"),
        ("", {"PYCKPT_CUDA": "yes"}, "PYCKPT_CUDA must be auto, 0 or 1, not 'yes'"),
        ("", {"PYCKPT_LABEL": "cpu"}, "PYCKPT_LABEL must be 0 or 1, not 'cpu'"),
        (OTHER_CUDA, {"PYCKPT_CUDA": "1"}, "no CUDA toolkit with nvcc and headers was"),
    ],
    ids=[
        *("setuptools", "torch", "old torch", "headers", "CXX", "compiler"),
        *("PYCKPT_CUDA", "PYCKPT_LABEL", "nvcc"),
    ],
)
def test_what_is_missing_is_said_and_what_to_do(
    tree: Path, before: str, environment: dict[str, str], says: str
) -> None:
    nothing = {"CUDA_HOME": str(tree)}  # a toolkit that was taken away
    done = setup(tree, "-q", "build_ext", "--inplace", before=before, **nothing, **environment)
    assert done.returncode == 1
    assert "pyckpt cannot be built: " in done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def fake_toolkit(home: Path, release: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("by", ["CUDA_HOME", "a link on the PATH"])
def test_a_toolkit_of_another_cuda_is_said(tree: Path, tmp_path: Path, by: str) -> None:
    home = fake_toolkit(tmp_path / "toolkit", "12.4")
    if by == "CUDA_HOME":
        environment = {"CUDA_HOME": str(home)}
    else:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
        path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
        environment = {"CUDA_HOME": "", "CUDA_PATH": "", "PATH": path}
    done = setup(
        tree,
        *("-q", "build_ext", "--inplace"),
        before=OTHER_CUDA,
        PYCKPT_CUDA="auto",
        **environment,
    )
    assert done.returncode == 1
    assert f"{home}/bin/nvcc is of CUDA 12.4" in done.stderr
    assert "of CUDA 99.0. Set CUDA_HOME to a toolkit of CUDA 99.0, or PYCKPT_CUDA=0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_build_without_the_cuda_that_torch_has_is_said(tree: Path, tmp_path: Path) -> None:
    done = setup(
        tree,
        *("-q", "dist_info", "--output-dir", tmp_path),
        before=OTHER_CUDA,
        PYCKPT_CUDA="auto",
        CUDA_HOME=str(tree),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built WITHOUT CUDA" in done.stderr
