"""A Trainer of Transformers that saves and resumes through `pyckpt.Checkpointer`. ::

    from pyckpt.integrations.transformers import Trainer  # in place of transformers' own

`CheckpointerMixin` does the same for other classes that derive from ``transformers.Trainer``.
`get_last_checkpoint` is for scripts that look for the checkpoint themselves.
"""

from pyckpt.integrations.versions import require

require("transformers", minimum="5.20", below="6", extra="transformers")

from pyckpt.integrations.transformers.source import get_last_checkpoint  # noqa: E402
from pyckpt.integrations.transformers.trainer import CheckpointerMixin, Trainer  # noqa: E402

__all__ = ["CheckpointerMixin", "Trainer", "get_last_checkpoint"]
