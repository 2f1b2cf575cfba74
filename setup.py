"""Builds the extension ``pyckpt._C``. Everything else but the version is in pyproject.toml.

PYCKPT_LABEL=1         say in the version what the extension is built for: 0.1.0+torch2.13.cpu
PYCKPT_CUDA=auto|0|1   with CUDA where torch has it and a toolkit is found; never; or fail
DEBUG=1                assertions and symbols, no optimisation
SANITIZE=address       or thread, undefined: with that sanitizer of the compiler
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools
from setuptools import setup

VERSION = "0.1.0.dev0"

HERE = Path(__file__).parent
TORCH_MIN = (2, 9)
SETUPTOOLS_MIN = 77  # as in pyproject.toml; older ones refuse that file with other words
HOW = "pip install --no-build-isolation ."


def fail(what: str) -> Any:
    raise SystemExit(f"\npyckpt cannot be built: {what}\n")


def release(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.1+cu130."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    assert numbers is not None, version
    return int(numbers[1]), int(numbers[2])


if release(setuptools.__version__)[0] < SETUPTOOLS_MIN:
    fail(
        f"setuptools {setuptools.__version__} is too old. Run: pip install "
        f'"setuptools>={SETUPTOOLS_MIN}" ninja, then again: {HOW}'
    )

# Sources are packed without torch: what they are built with is another's choice.
if any(command in sys.argv[1:] for command in ("sdist", "egg_info")):
    setup(version=VERSION, install_requires=[f"torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}"])
    sys.exit()

try:
    import torch
except ImportError:
    fail(
        "its extension is built against the torch that will run it, and this environment has none. "
        f"Install torch {TORCH_MIN[0]}.{TORCH_MIN[1]} or later (https://pytorch.org), then: {HOW}"
    )
if release(torch.__version__) < TORCH_MIN:
    fail(
        f"torch {torch.__version__} is older than {TORCH_MIN[0]}.{TORCH_MIN[1]}. Update torch, "
        f"then: {HOW}"
    )


def find_toolkit() -> Path | None:
    """One that has compiler and headers. Torch looks beside the nvcc on the PATH, which may be a
    link, or a script, far from the toolkit."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        candidates = [Path(named)]
    else:
        found = shutil.which("nvcc")
        candidates = (
            [Path(found).parent.parent, Path(found).resolve().parent.parent] if found else []
        )
        candidates.append(Path("/usr/local/cuda"))
    for home in candidates:
        headers = [home / "include", *home.glob("targets/*/include")]
        if (home / "bin" / "nvcc").exists() and any(
            (h / "cuda_runtime.h").exists() for h in headers
        ):
            return home
    return None


toolkit = find_toolkit()
if toolkit is not None:
    os.environ["CUDA_HOME"] = str(toolkit)  # torch reads it once, when this is imported:

from torch.utils import cpp_extension  # noqa: E402
from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    CUDAExtension,
)


def with_cuda() -> bool:
    choice = os.environ.get("PYCKPT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        fail(f"PYCKPT_CUDA must be auto, 0 or 1, not {choice!r}")
    missing = [
        reason
        for reason, is_missing in (
            (f"torch {torch.__version__} was built without CUDA", torch.version.cuda is None),
            ("no CUDA toolkit with nvcc and headers was found (set CUDA_HOME)", toolkit is None),
        )
        if is_missing
    ]
    if choice == "1" and missing:
        fail(f"PYCKPT_CUDA=1, but {' and '.join(missing)}")
    if choice == "auto" and torch.version.cuda is not None and missing:
        print(
            f"pyckpt: {' and '.join(missing)}, so the extension is built WITHOUT CUDA and cannot "
            f"save from a GPU asynchronously",
            file=sys.stderr,
        )
    return choice != "0" and not missing


def check_toolkit() -> None:
    assert toolkit is not None
    assert torch.version.cuda is not None
    compiler = toolkit / "bin" / "nvcc"
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    if found and release(found[1])[0] != release(torch.version.cuda)[0]:
        fail(
            f"{compiler} is of CUDA {found[1]}, and torch {torch.__version__} of CUDA "
            f"{torch.version.cuda}. Set CUDA_HOME to a toolkit of CUDA {torch.version.cuda}, or "
            f"PYCKPT_CUDA=0 to build without CUDA"
        )


def check_compiler() -> None:
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        fail(
            f"there is no C++ compiler {compiler!r}. Install one (Debian: apt-get install g++; "
            f"Fedora: dnf install gcc-c++), or name it in CXX"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        fail(
            f"{header} is missing. Install Python's headers (Debian: apt-get install python3-dev; "
            f"Fedora: dnf install python3-devel)"
        )


def flags() -> tuple[list[str], list[str]]:
    # Torch names the C++ standard that its headers take: 17, later 20. In 17, they use one harmless
    # feature of 20.
    compile_flags = ["-Wall", "-Wno-c++20-extensions", "-fvisibility=hidden"]
    link_flags: list[str] = []
    compile_flags += ["-O0", "-g"] if os.environ.get("DEBUG") == "1" else ["-O3"]
    if sanitizer := os.environ.get("SANITIZE"):
        compile_flags += [f"-fsanitize={sanitizer}", "-g", "-fno-omit-frame-pointer"]
        link_flags += [f"-fsanitize={sanitizer}"]
    return compile_flags, link_flags


def name_architectures() -> None:
    """Torch compiles for the GPUs that it sees, and where it sees none fails, or compiles for none.
    Then: for those of data centres since Turing, and, as PTX, for all that come after."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        os.environ["TORCH_CUDA_ARCH_LIST"] = "7.5;8.0;8.6;8.9;9.0+PTX"


cuda = with_cuda()
if cuda and cpp_extension.CUDA_HOME is None:
    cpp_extension.CUDA_HOME = str(toolkit)  # or else it fails before it is said what is the matter


def label() -> str:
    """The local version (PEP 440) that PYCKPT_LABEL=1 asks for: wheels for several torches can lie
    in one folder, and each be asked for by name. It names the CUDA of the extension, not of torch:
    an extension without CUDA works with any torch of its minor release."""
    choice = os.environ.get("PYCKPT_LABEL", "0")
    if choice not in ("0", "1"):
        fail(f"PYCKPT_LABEL must be 0 or 1, not {choice!r}")
    if choice == "0":
        return ""
    kind = f"cu{torch.version.cuda.replace('.', '')}" if cuda else "cpu"
    return "+torch{}.{}.{}".format(*release(torch.__version__), kind)


class Build(BuildExtension):  # type: ignore[misc]
    """Writes down what the extension was built against, beside the extension: importing compares it
    with the torch that it finds, before it loads the extension."""

    def run(self) -> None:
        check_compiler()
        if cuda:
            check_toolkit()
        super().run()
        package = HERE if self.inplace else Path(self.build_lib)
        (package / "pyckpt" / "_build.py").write_text(
            '"""Written by setup.py."""\n\n'
            f"torch_version = {str(torch.__version__)!r}\n"
            f"cuda_version = {torch.version.cuda if cuda else None!r}\n"
        )


compile_flags, link_flags = flags()
sources = sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cpp"))
if cuda:
    name_architectures()
    sources += sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cu"))
else:
    sources = [source for source in sources if not source.endswith("_cuda.cpp")]

setup(
    version=VERSION + label(),
    # Torch keeps its C++ interface within a minor release: what was built takes that one alone.
    install_requires=["torch=={}.{}.*".format(*release(torch.__version__))],
    ext_modules=[
        (CUDAExtension if cuda else CppExtension)(
            "pyckpt._C",
            sources,
            define_macros=[("PYCKPT_CUDA", None)] if cuda else [],
            extra_compile_args={"cxx": compile_flags, "nvcc": ["-O3"]},
            extra_link_args=link_flags,
        )
    ],
    cmdclass={"build_ext": Build},
)
