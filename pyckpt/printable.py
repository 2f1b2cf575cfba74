"""Text for people: untrusted text, such as the names in a file, is escaped before it is shown."""

from __future__ import annotations

__all__ = ["printable", "rate_text", "size_text"]


def printable(text: str) -> str:
    """The text, with Python's escapes in place of characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size_text(count: float) -> str:
    """A number of bytes, in decimal units: ``1.5 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def rate_text(count: float, seconds: float) -> str:
    """Bytes in a second: ``1.5 GB/s``; empty if nothing was timed."""
    return f"{size_text(count / seconds)}/s" if seconds > 0 else ""
