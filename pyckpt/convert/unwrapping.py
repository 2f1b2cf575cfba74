"""Names without what DDP, ``torch.compile`` and others have put before and between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pyckpt.train.state.modules import without_wrappers

__all__ = ["REPLICATED", "unwrapping"]

REPLICATED = "module."
"""What DDP and DataParallel put before every name. A submodule may be called that, too."""


def unwrapping(names: Iterable[str], own: Collection[str] = ()) -> Callable[[str], str]:
    """A function that returns a name of a model without the wrappers that the model had.

    Args:
        names: all names of the model that have its wrappers, in whatever order these were put on.
        own: the names that the model has without wrappers, if they are known. What fits most of
            them is taken, so that a submodule called "module" keeps its name.
    """
    names = list(names)
    inner = [without_wrappers(name) for name in names]
    if len(set(inner)) < len(set(names)):
        return str  # as they are, since two would become one
    most = 0
    while names and all(name.startswith(REPLICATED * (most + 1)) for name in inner):
        most += 1
    count = min(most, 1)
    if own:
        fitting = [
            sum(name.removeprefix(REPLICATED * n) in own for name in inner) for n in range(most + 1)
        ]
        if any(fitting):
            count = fitting.index(max(fitting))
    return lambda name: without_wrappers(name).removeprefix(REPLICATED * count)
