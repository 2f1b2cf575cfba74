"""Escapes untrusted text, such as the names in a file, before it is shown."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text, with Python's escapes in place of characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
