"""Versions, the extension, CUDA, and the environment."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from pyckpt import _C
from pyckpt.tools.doctor.finding import Finding

__all__ = ["cuda", "environment", "frameworks", "look", "versions"]

TESTED = ((2, 9), (2, 13))
"""The releases of torch, first and last, with which all tests pass."""
POPULATES = (5, 14)
"""The Linux that can fill pages with memory ahead of their use (MADV_POPULATE_WRITE)."""
SAYS_ALIGNMENT = (6, 1)
"""The Linux that says what direct I/O asks for (STATX_DIOALIGN)."""


def look(variables: Mapping[str, str]) -> Iterator[Finding]:
    """All findings of this module, of which ``variables`` are the environment's."""
    yield from versions()
    yield from cuda()
    yield from environment(variables)
    yield from frameworks()


def versions() -> Iterator[Finding]:
    try:
        own = importlib.metadata.version("pyckpt")
    except importlib.metadata.PackageNotFoundError:
        own = "from a source tree that is not installed"
    # Importing pyckpt has compared the extension with this torch already.
    kind = "with CUDA" if _C.cuda else "without CUDA"
    yield Finding("pyckpt", "good", f"{own}; its extension: torch {_C.torch_version}, {kind}")
    yield torch_release(torch.__version__)
    yield Finding("python", "good", platform.python_version())
    if "free-threading" in sys.version and sys.version_info < (3, 14):
        yield Finding(
            "python",
            "warning",
            "a build without the GIL, of a version with which pyckpt is untested",
            "use Python 3.14t, or one with the GIL",
        )
    yield kernel(platform.release(), platform.version())
    libc = " ".join(platform.libc_ver()) or "not glibc"
    yield Finding("C library", "good", libc)


def torch_release(version: str) -> Finding:
    first, last = (".".join(map(str, release)) for release in TESTED)
    if TESTED[0] <= _numbers(version)[:2] <= TESTED[1]:
        return Finding("torch", "good", version)
    return Finding(
        "torch",
        "warning",
        f"{version}, and pyckpt is tested with {first} to {last}",
        f"install one of those, and build pyckpt again: pip install 'torch=={last}.*'",
    )


def kernel(release: str, version: str) -> Finding:
    # gVisor answers as this kernel of 2016, whatever runs below it.
    if release.startswith("4.4.0") and "Sun Jan 10 15:06:54 PST 2016" in version:
        return Finding(
            "kernel",
            "warning",
            "gVisor, which answers system calls itself: slow, and direct I/O may be an imitation",
            "measure with pyckpt bench; if it is too slow, use another runtime for the container",
        )
    numbers = _numbers(release)[:2]
    if numbers < POPULATES:
        return Finding(
            "kernel",
            "note",
            f"{release}: cannot fill memory with pages ahead, so a first save takes longer",
            "Linux 5.14 can",
        )
    if numbers < SAYS_ALIGNMENT:
        return Finding(
            "kernel",
            "note",
            f"{release}: does not say what direct I/O asks for, so pyckpt assumes 4096 bytes",
            "Linux 6.1 says it",
        )
    return Finding("kernel", "good", release)


def cuda() -> Iterator[Finding]:
    driver = driver_version()
    devices = torch.cuda.device_count() if torch.version.cuda else 0
    if devices == 0:
        if driver and torch.version.cuda is None:
            yield Finding(
                "CUDA",
                "warning",
                f"a driver ({driver}), but torch {torch.__version__} is built without CUDA",
                "install a torch with CUDA (https://pytorch.org), and build pyckpt again",
            )
        elif driver:
            yield Finding(
                "CUDA",
                "warning",
                f"a driver ({driver}), but torch sees no device",
                "look at CUDA_VISIBLE_DEVICES, and at what nvidia-smi says",
            )
        else:
            yield Finding("CUDA", "note", "no device: pyckpt saves and loads tensors of the host")
        return
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(devices)}))
    found = f"{devices} x {names}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}"
    if _C.cuda:
        yield Finding("CUDA", "good", found)
    else:
        yield Finding(
            "CUDA",
            "bad",
            f"{found}; pyckpt's extension is built without CUDA and cannot save from a device",
            "with a CUDA toolkit at CUDA_HOME: PYCKPT_CUDA=1 pip install --no-build-isolation "
            "--force-reinstall --no-deps .",
        )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's driver; empty if there is none."""
    try:
        found = re.search(r"(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        return ""
    return found[1] if found else "of unknown version"


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change how torch and pyckpt work."""
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "CUDA_LAUNCH_BLOCKING",
            "warning",
            "set: the host waits for each kernel, so a save cannot go on beside the training",
            "unset it, except to find an error",
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in variables.get(name, "").replace(" ", "").lower():
            yield Finding(
                name,
                "note",
                "expandable segments are on, with which pyckpt has not been measured",
                "if copies from the device are slow, compare with them off",
            )
    if variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        yield Finding(
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "warning",
            "set: each tensor that is freed makes the host wait for the device",
            "unset it, except to find an error",
        )
    yield from ranks(variables)


def ranks(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What a launcher such as torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names if variables.get(name)]
    if there and len(there) < len(names):
        missing = ", ".join(name for name in names if name not in there)
        yield Finding(
            "torch.distributed",
            "warning",
            f"{', '.join(there)} is set, and {missing} is not: init_process_group() fails",
            "start the program with torchrun, or set all of them, or none",
        )
    size = variables.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1 and not variables.get("LOCAL_WORLD_SIZE"):
        yield Finding(
            "LOCAL_WORLD_SIZE",
            "warning",
            f"not set, and WORLD_SIZE is {size}: each rank of this machine takes up to a quarter "
            "of its memory for copies",
            "set it to the number of ranks of a machine (torchrun does), or call "
            "pyckpt.configure(max_pinned_bytes=...)",
        )


def frameworks() -> Iterator[Finding]:
    """Of those for which pyckpt has an integration, the ones that are installed."""
    try:
        requirements = importlib.metadata.requires("pyckpt") or []
    except importlib.metadata.PackageNotFoundError:
        return
    ranges = {
        "accelerate": "pyckpt.integrations.accelerate",
        "lightning": "pyckpt.integrations.lightning",
        "torchtitan": "pyckpt.integrations.torchtitan",
        "transformers": "pyckpt.integrations.transformers",
    }
    for requirement in requirements:
        parsed = re.match(
            r'([a-z]+)\s*\(?([<>=!~0-9.,\s]*)\)?\s*;.*extra == ["\'](\w+)', requirement
        )
        # An extra may bring several packages; its own is the one of its name.
        if parsed is None or parsed[1] != parsed[3] or parsed[1] not in ranges:
            continue
        package, wanted = parsed[1], parsed[2].replace(" ", "")
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield framework(package, version, wanted, ranges[package])


def framework(package: str, version: str, wanted: str, module: str) -> Finding:
    """``wanted`` is such as ``>=2.6,<2.7``."""
    bounds = re.findall(r"(>=|<)([\d.]+)", wanted)
    numbers = _numbers(version)
    if all(numbers >= _numbers(b) if how == ">=" else numbers < _numbers(b) for how, b in bounds):
        return Finding(package, "good", f"{version}, which {module} takes")
    return Finding(
        package,
        "warning",
        f"{version}, and {module} takes {wanted}: importing that fails",
        f"if you use it: pip install 'pyckpt[{package}]'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release.group().split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 2.6 and 2.6.0 are the same release
        numbers.pop()
    return tuple(numbers)
