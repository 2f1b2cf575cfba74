"""Which releases of a framework are taken, and what those that are not get to read."""

import importlib.metadata

import pytest

from pyckpt.integrations.versions import require


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.6", "2.6.1rc1", "2.6.0+cpu", "2.10"])
def test_a_release_within_the_range_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert require("frame", minimum="2.6.0", below="3", extra="frame") == version


@pytest.mark.parametrize("version", ["2.5.9", "3", "3.0.0", "0", "1.99", "unknown"])
def test_another_release_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(ImportError, match=rf"there is {version}; .*'pyckpt\[frame\]'") as error:
        require("frame", minimum="2.6", below="3", extra="frame")
    assert error.value.name == "frame"


def test_a_missing_framework_is_said_with_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"and there is none; .*'pyckpt\[lightning\]'"):
        require("no-such-framework", minimum="2.6", below="2.7", extra="lightning")
