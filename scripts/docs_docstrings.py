"""The docstrings as Markdown, for mkdocstrings: ``::`` before an example is of another markup."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?: (::)|(::))$", re.MULTILINE)


class Examples(griffe.Extension):
    """Takes the ``::`` away, or leaves the colon of a sentence that ends with it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda match: ":" if match[2] else "", text)
