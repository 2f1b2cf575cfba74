"""`NodeRestore`: what a `Restorer` asks where each node has a directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from pyckpt.engine import Engine
from pyckpt.train.nodes.choosing import Chooser
from pyckpt.train.nodes.committing import NodeCommit
from pyckpt.train.nodes.grouping import Nodes
from pyckpt.train.nodes.reading import NodeReader
from pyckpt.train.store.catalog import Catalog, CheckpointInfo
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.pieces import Direct
from pyckpt.train.sync.ranks import Ranks
from pyckpt.train.tiers.tier import Tier

__all__ = ["NodeParts", "NodeRestore", "nodes_of"]


class NodeRestore:
    """Finds and opens checkpoints whose parts are on several nodes. All ranks make the same calls.

    Args:
        catalog: of the checkpoints in the directory of this node.
        nodes: the nodes.
        mirror: the mirror, if there is one.
        commits: finishes what a save that was killed left half committed.
    """

    def __init__(
        self, catalog: Catalog, nodes: Nodes, mirror: Tier | None, commits: NodeCommit
    ) -> None:
        self._nodes = nodes
        self._commits = commits
        self._chooser = Chooser(catalog, nodes, mirror)

    def settle(self) -> None:
        """See `NodeCommit.settle`."""
        self._commits.settle()

    def newest(
        self,
        limit: int | None,
        *,
        exactly: int | None,
        not_local: Collection[int],
        not_mirrored: Collection[int],
    ) -> CheckpointInfo | None:
        """See `Chooser.newest`."""
        return self._chooser.newest(
            limit, exactly=exactly, not_local=not_local, not_mirrored=not_mirrored
        )

    @property
    def has_metadata(self) -> bool:
        """Whether this node, or the mirror that it reads from, has the metadata of the checkpoint
        that was found last. If not, it gets it from another node."""
        places = self._chooser.places
        return self._nodes.first in places.has_metadata or places.mirror is not None

    def reader(self, found: CheckpointInfo, *, direct: Direct, engine: Engine | None) -> NodeReader:
        """A reader of the checkpoint that was found last."""
        places = self._chooser.places
        return NodeReader(found, places, self._nodes, direct=direct, engine=engine)


class NodeParts(NamedTuple):
    """What a Checkpointer needs to know of its node."""

    leads: bool
    """Whether this rank makes its directory ready, and prunes there."""
    members: Collection[int]
    """The ranks of its node, if it leads and there may be several nodes."""
    commits: NodeCommit | None
    restores: NodeRestore | None


def nodes_of(
    node_local: bool,
    catalog: Catalog,
    ranks: Ranks,
    mirror: Tier | None,
    fence: Fence,
    on_settled: Callable[[], None],
) -> NodeParts:
    """Find out which ranks share a directory, unless it is said that all do. Collective then.

    Args:
        on_settled: as for `NodeCommit`.

    Raises:
        Exception: as `Nodes`.
    """
    if not node_local:
        return NodeParts(ranks.rank == 0, (), None, None)
    nodes = Nodes(catalog.directory, ranks)
    commits = NodeCommit(catalog.directory, nodes, fence.held, on_settled)
    restores = NodeRestore(catalog, nodes, mirror, commits)
    return NodeParts(nodes.is_first, nodes.members if nodes.is_first else (), commits, restores)
