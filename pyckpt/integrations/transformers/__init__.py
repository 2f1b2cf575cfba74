"""A Trainer of Transformers that saves and resumes through `pyckpt.Checkpointer`. ::

    from pyckpt.integrations.transformers import Trainer  # in place of transformers' own

`CheckpointerMixin` does the same for other classes that derive from ``transformers.Trainer``.
"""

from pyckpt.integrations.versions import require

require("transformers", minimum="5.20", below="6", extra="transformers")

from pyckpt.integrations.transformers.trainer import CheckpointerMixin, Trainer  # noqa: E402

__all__ = ["CheckpointerMixin", "Trainer"]
