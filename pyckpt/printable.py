"""Text that others wrote, such as the names in a file, as it may be shown."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text, with escapes in the place of what is no printable character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
