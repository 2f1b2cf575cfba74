"""Text for people: untrusted text, such as the names in a file, is escaped before it is shown."""

from __future__ import annotations

__all__ = ["digits", "printable", "rate_text", "seconds_text", "size_text"]


def printable(text: str) -> str:
    """The text, with Python's escapes in place of characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def digits(value: float) -> str:
    """Three digits of a positive number, or all before its point: ``0.0123``, ``1.5``, ``1234``."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def size_text(count: float) -> str:
    """A number of bytes, in decimal units: ``1.5 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{digits(count / scale)} {unit}"
    return f"{count:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """A duration: ``1.5 s``, from two minutes on ``2 min 5 s``, from two hours on ``2 h 5 min``."""
    if seconds < 120:
        return f"{digits(seconds)} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rate_text(count: float, seconds: float) -> str:
    """Bytes in a second: ``1.5 GB/s``; empty if nothing was timed."""
    return f"{size_text(count / seconds)}/s" if seconds > 0 else ""
