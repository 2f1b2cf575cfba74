"""Builds the extension ``pyckpt._C``. Everything else is in pyproject.toml.

PYCKPT_CUDA=auto|0|1   with CUDA where torch has it and a toolkit is found; never; or fail
DEBUG=1                assertions and symbols, no optimisation
SANITIZE=address       or thread, undefined: with that sanitizer of the compiler
"""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

HERE = Path(__file__).parent


def with_cuda() -> bool:
    choice = os.environ.get("PYCKPT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"PYCKPT_CUDA must be auto, 0 or 1, not {choice!r}")
    missing = [
        reason
        for reason, is_missing in (
            (f"torch {torch.__version__} was built without CUDA", torch.version.cuda is None),
            ("no CUDA toolkit was found (set CUDA_HOME)", CUDA_HOME is None),
        )
        if is_missing
    ]
    if choice == "1" and missing:
        raise SystemExit(f"PYCKPT_CUDA=1, but {' and '.join(missing)}")
    return choice != "0" and not missing


def flags() -> tuple[list[str], list[str]]:
    # Torch's own headers use one harmless feature of C++20.
    compile_flags = ["-std=c++17", "-Wall", "-Wno-c++20-extensions", "-fvisibility=hidden"]
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
compile_flags, link_flags = flags()
sources = sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cpp"))
if cuda:
    name_architectures()
    sources += sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cu"))
else:
    sources = [source for source in sources if not source.endswith("_cuda.cpp")]

# What importing compares with the torch it finds, before it loads the extension.
(HERE / "pyckpt" / "_build.py").write_text(
    '"""Written by setup.py."""\n\n'
    f"torch_version = {str(torch.__version__)!r}\n"
    f"cuda_version = {torch.version.cuda if cuda else None!r}\n"
)

setup(
    ext_modules=[
        (CUDAExtension if cuda else CppExtension)(
            "pyckpt._C",
            sources,
            define_macros=[("PYCKPT_CUDA", None)] if cuda else [],
            extra_compile_args={"cxx": compile_flags, "nvcc": ["-std=c++17", "-O3"]},
            extra_link_args=link_flags,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
