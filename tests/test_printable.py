"""Text for people: three digits, no powers of ten, and nothing that moves the cursor."""

from __future__ import annotations

import pytest

from pyckpt.printable import digits, printable, rate_text, seconds_text, size_text


def test_what_moves_the_cursor_is_escaped() -> None:
    assert printable("weights/é") == "weights/é"
    assert printable("a\x1b[2K\n") == r"a\x1b[2K\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (1.5, "1.5"),
        (99.94, "99.9"),
        (99.97, "100"),
        (999.9, "1000"),
        (1234, "1234"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (999.9e6, "1000 MB"),
        (12e15, "12000 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size_text(count) == text


def test_a_rate_is_left_out_where_nothing_was_timed() -> None:
    assert rate_text(3e9, 2) == "1.5 GB/s"
    assert rate_text(3e9, 0) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0012, "0.0012 s"),
        (119.4, "119 s"),
        (120, "2 min 0 s"),
        (1234, "20 min 34 s"),
        (3599.6, "60 min 0 s"),
        (7199.7, "2 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
