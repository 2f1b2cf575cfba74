"""Which releases of a framework an integration was tested with."""

import importlib.metadata
import re


def require(package: str, *, minimum: str, below: str, extra: str) -> str:
    """The installed version of `package`, which must be from `minimum` on and under `below`.

    Versions are compared by their numbers: a pre-release counts as its release.

    Raises:
        ImportError: The package is not installed, or its version is out of that range. The message
            says what to install.
    """
    wanted = f"{package} from {minimum} on and under {below}"
    advice = f"install it with: pip install 'pyckpt[{extra}]'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        message = f"this integration needs {wanted}, and there is none; {advice}"
        raise ImportError(message, name=package) from None
    if not _numbers(minimum) <= _numbers(version) < _numbers(below):
        message = f"this integration was tested with {wanted}, and there is {version}; {advice}"
        raise ImportError(message, name=package)
    return version


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release.group().split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 2.6 and 2.6.0 are the same release
        numbers.pop()
    return tuple(numbers)
