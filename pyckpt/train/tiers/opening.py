"""The tier at an address."""

from __future__ import annotations

import os
from pathlib import Path

from pyckpt.remote.address import is_url, local_path
from pyckpt.train.arguments import directory_of
from pyckpt.train.store.names import Naming
from pyckpt.train.tiers.bucket import BucketTier
from pyckpt.train.tiers.mounted import MountedTier
from pyckpt.train.tiers.tier import Tier

__all__ = ["open_tier"]


def open_tier(address: str | os.PathLike[str], root: Path, naming: Naming) -> Tier:
    """The mirror at a URL or in a directory.

    Args:
        address: a URL, ``file://`` included, or a path.
        root: the directory that it mirrors.
        naming: the names of the checkpoints in both.

    Raises:
        TypeError: it is no string and no path.
        ImportError: it is a URL, and obstore is not installed.
        ValueError: it is a URL of no kind that obstore knows, or one below which checkpoints of
            such names cannot be; or it is ``root`` itself.
    """
    path = local_path(address, "mirror")
    if is_url(path):
        return BucketTier(os.fspath(path), root, naming)
    directory = directory_of(path, "mirror")
    if os.path.realpath(directory) == os.path.realpath(root):
        raise ValueError(f"{address} is the directory of the checkpoints, and cannot mirror itself")
    return MountedTier(directory, root, naming)
