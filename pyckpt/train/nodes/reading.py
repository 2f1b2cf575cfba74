"""`NodeReader`: reads a checkpoint whose parts are on several nodes.

A rank reads what its node has from there. What its node lacks comes from the nodes that have it, or
else from the mirror: values that rank 0 saved for all, say, or all data of a rank whose node has
lost its disk. The first rank of the node fetches it into a *view* of the checkpoint: a directory
with links to the node's own files, and files with holes that hold what was fetched, where it was.
From there all ranks of the node read it as they read any file, and compare checksums.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from pyckpt.dcp.folder import Folder, LocalFolder
from pyckpt.dcp.reader import DirectReader
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.format.files import open_regular
from pyckpt.format.flock import trying
from pyckpt.remote.folder import RemoteFolder
from pyckpt.train.nodes.choosing import Places
from pyckpt.train.nodes.grouping import Nodes
from pyckpt.train.store.catalog import CheckpointInfo
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.pieces import Direct, verify

__all__ = ["NodeReader"]

_VIEW = "view-"
_LOCK = ".lock"
_PIECE_BYTES = 16 << 20
_UNDER_WAY_MAX = 4  # of pieces, on each rank
_TAGS = 1 << 15  # which any backend has
_GAP_BYTES = 64 << 10  # what lies between two ranges is fetched, too, if it is less

Ranges = dict[str, list[tuple[int, int]]]
"""Offsets and lengths, in their order, by the name of the file."""


class _Transfer(NamedTuple):
    """A range of a file on its way from one node to another."""

    name: str
    offset: int
    length: int
    sender: int
    """The first rank of a node that has the file."""
    receiver: int
    """The first rank of the node that wants it."""


class NodeReader(DirectReader):
    """A `DirectReader` of a checkpoint whose parts are on several nodes. All ranks of the nodes
    load together, once. Use it as a context, which is collective at its beginning.

    Args:
        found: the checkpoint.
        places: where its files are.
        nodes: the nodes.
        direct, engine: as for `DirectReader`.
    """

    def __init__(
        self,
        found: CheckpointInfo,
        places: Places,
        nodes: Nodes,
        *,
        direct: Literal["auto", "require", "off"],
        engine: Engine | None,
    ) -> None:
        super().__init__(found.place, direct=direct, engine=engine)
        self._found = found
        self._places = places
        self._nodes = nodes
        self._is_remote = not found.is_local
        self._view: Path | None = None
        self._held = ExitStack()
        self._is_filled = False
        self._made: set[str] = set()  # of the view's files, those that are no links

    def __enter__(self) -> NodeReader:
        places, nodes = self._places, self._nodes
        token = nodes.from_rank(0, os.urandom(8).hex())
        # A rank of which the node has no metadata, and that reads none in the mirror, gets it here.
        needy = [
            rank
            for rank, is_needy in enumerate(
                nodes.together("beginning to load", self._lacks_metadata)
            )
            if is_needy
        ]
        metadata: bytes | None = None
        if needy:
            giver = min(places.has_metadata)
            own: list[bytes] = []
            path = self._found.path / commit.metadata_name()

            def read() -> None:
                if nodes.ranks.rank == giver:
                    own.append(path.read_bytes())

            nodes.together("reading the metadata for other nodes", read)
            metadata = nodes.from_rank(giver, own[0] if own else None)
        self._view = self._found.path.parent / FOLDER / f"{_VIEW}{token}"
        try:
            make = partial(self._make_view, metadata)
            nodes.together("making room for what is on other nodes", make)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._nodes.is_first and self._view is not None:
            shutil.rmtree(self._view, ignore_errors=True)
            with suppress(OSError):
                _lock_of(self._view).unlink()
        self._held.close()

    def _lacks_metadata(self) -> bool:
        return not self._is_remote and self._nodes.first not in self._places.has_metadata

    def _make_view(self, metadata: bytes | None) -> None:
        if not self._nodes.is_first or self._is_remote:
            return
        assert self._view is not None
        commit.make_directory(self._view.parent, sync=False)
        _remove_stale(self._view.parent)
        # Locked before the view is there: else another restore could take it for a stale one.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(_lock_of(self._view), flags, 0o666)
        self._held.callback(os.close, descriptor)
        is_mine = self._held.enter_context(trying(descriptor))
        if not is_mine or not os.fstat(descriptor).st_nlink:
            raise LoadError(f"{self._view}: another restore has just looked at it; restore again")
        self._view.mkdir()
        name = commit.metadata_name()
        if self._lacks_metadata():
            (self._view / name).write_bytes(metadata or b"")
        else:
            (self._view / name).symlink_to(self._found.path / name)
        for name in self._places.here:
            (self._view / name).symlink_to(self._found.path / name)

    @property
    def _folder(self) -> Folder:
        if self._is_remote or (not self._is_filled and not self._lacks_metadata()):
            return super()._folder
        assert self._view is not None
        engine = default_engine() if self._engine is None else self._engine
        return LocalFolder(self._view, engine, direct=self.direct)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        nodes = self._nodes
        wanted = nodes.together("planning what to fetch", partial(self._lacking, plan))
        of_node: dict[int, Ranges] = {}
        for first in nodes.firsts:
            members = [rank for rank, of in enumerate(nodes.first_of) if of == first]
            of_node[first] = _union(wanted[rank] for rank in members)
        if any(of_node.values()):
            mine = of_node[nodes.first] if nodes.is_first else {}
            own: list[torch.Tensor] = []

            def make_room() -> None:
                self._make_files(mine)
                count = _UNDER_WAY_MAX if nodes.is_first else 0
                own.extend(
                    torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(count)
                )

            nodes.together("making room for it", make_room)
            failures: list[Exception] = []
            # Allocated before any rank waits for bytes of another.
            self._pass_all(of_node, own, failures)

            def finish() -> None:
                if failures:
                    raise failures[0]
                self._fetch_from_mirror(
                    {
                        name: ranges
                        for name, ranges in mine.items()
                        if name not in self._places.holders
                    }
                )

            nodes.together("fetching what other nodes have", finish)
            self._is_filled = not self._is_remote
        with self._in_view():
            return super().read_data(plan, planner)

    def check(self, metadata: Metadata, keys: Iterable[str], *, direct: Direct) -> set[str]:
        """Compare all checksums under some keys, each rank a share of what its node has; what no
        node has, in the mirror. Arguments and errors as `verify`."""
        nodes, places = self._nodes, self._places
        wanted = set(keys)
        members = nodes.members

        def of(first: int | None) -> Metadata:
            items = (metadata.storage_data or {}).items()
            chosen = {
                i: info for i, info in items if places.holders.get(info.relative_path) == first
            }
            return replace(metadata, storage_data=chosen)

        without: set[str] = set()
        if nodes.first in places.has_metadata:
            share = (members.index(nodes.ranks.rank), len(members))
            without |= verify(
                self._found.path,
                of(nodes.first),
                keys=wanted,
                share=share,
                direct=direct,
                engine=self._engine,
            )
        if places.mirror is not None:
            share = (nodes.ranks.rank, nodes.ranks.size)
            without |= verify(
                places.mirror,
                of(None),
                keys=wanted,
                share=share,
                direct=direct,
                engine=self._engine,
            )
        return without

    # --- what to fetch ---

    def _lacking(self, plan: LoadPlan) -> Ranges:
        """What this rank is to load, and its node lacks."""
        assert self._metadata is not None
        ranges: dict[str, set[tuple[int, int]]] = defaultdict(set)
        if not self._is_remote:
            here = set(self._places.here)
            for item in plan.items:
                info = self._metadata.storage_data[item.storage_index]
                if info.relative_path not in here:
                    ranges[info.relative_path].add((info.offset, info.length))
        return _union([{name: sorted(of_file) for name, of_file in ranges.items()}])

    def _transfers(self, of_node: dict[int, Ranges]) -> Iterator[_Transfer]:
        """All transfers between nodes, in the order that all ranks keep to."""
        for receiver in sorted(of_node):
            for name in sorted(of_node[receiver]):
                sender = self._places.holders.get(name)
                if sender is None:
                    continue
                for offset, length in of_node[receiver][name]:
                    for begin in range(offset, offset + length, _PIECE_BYTES):
                        size = min(_PIECE_BYTES, offset + length - begin)
                        yield _Transfer(name, begin, size, sender, receiver)

    # --- fetching ---

    def _make_files(self, mine: Ranges) -> None:
        assert self._view is not None
        for name in mine:
            with self._writing(), open(self._view / name, "xb") as file:
                file.truncate(self._places.files[name])
        self._made = set(mine)

    def _pass_all(
        self, of_node: dict[int, Ranges], buffers: list[torch.Tensor], failures: list[Exception]
    ) -> None:
        """Send and receive what this rank is to, some pieces at a time. All ranks keep to one
        order, so the first piece that has not arrived has been begun on both its ranks. Whatever
        fails, as many bytes travel, since others wait for them; the failure makes all ranks fail
        afterwards."""
        rank, group = self._nodes.ranks.rank, self._nodes.ranks.work
        under_way: deque[tuple[Any, _Transfer, torch.Tensor]] = deque()

        def end() -> None:
            work, transfer, buffer = under_way.popleft()
            work.wait()
            if rank == transfer.receiver:
                piece = buffer[: transfer.length]
                _attempt(partial(self._write_piece, transfer, piece), failures)
            buffers.append(buffer)

        for number, transfer in enumerate(self._transfers(of_node)):
            if rank not in (transfer.sender, transfer.receiver):
                continue
            if not buffers:
                end()
            buffer = buffers.pop()
            piece = buffer[: transfer.length].zero_()
            peer = transfer.receiver if rank == transfer.sender else transfer.sender
            peer = dist.get_global_rank(_known(group), peer)
            tag = number % _TAGS
            if rank == transfer.sender:
                _attempt(partial(self._read_piece, transfer, piece), failures)
                work = dist.isend(piece, peer, group=group, tag=tag)
            else:
                work = dist.irecv(piece, peer, group=group, tag=tag)
            under_way.append((work, transfer, buffer))
        while under_way:
            end()

    def _read_piece(self, transfer: _Transfer, piece: torch.Tensor) -> None:
        view = _memory(piece)
        with open_regular(self._found.path / transfer.name) as file:
            file.seek(transfer.offset)
            file.readinto(view)  # what is missing differs by its checksum

    def _write_piece(self, transfer: _Transfer, piece: torch.Tensor) -> None:
        self._write(transfer.name, transfer.offset, _memory(piece))

    def _write(self, name: str, offset: int, data: Any) -> None:
        assert self._view is not None
        with self._writing(), open(self._view / name, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def _fetch_from_mirror(self, wanted: Ranges) -> None:
        pieces = [
            (name, begin, min(_PIECE_BYTES, offset + length - begin))
            for name, ranges in wanted.items()
            for offset, length in ranges
            for begin in range(offset, offset + length, _PIECE_BYTES)
        ]
        if not pieces:
            return
        with ThreadPoolExecutor(_UNDER_WAY_MAX, thread_name_prefix="pyckpt-fetch") as threads:
            futures = [threads.submit(self._fetch_piece, *piece) for piece in pieces]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _fetch_piece(self, name: str, offset: int, length: int) -> None:
        mirror = self._places.mirror
        assert mirror is not None
        opened = RemoteFolder(mirror).open(name) if isinstance(mirror, str) else None
        with opened or open_regular(mirror / name) as file:  # type: ignore[operator]
            file.seek(offset)
            self._write(name, offset, file.read(length))

    # --- errors of the view, which say nothing of the checkpoint ---

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LoadError(
                f"{self._view}: what other nodes have could not be put there: {error}"
            ) from error

    @contextmanager
    def _in_view(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            view = self._view
            if self._is_remote or view is None:
                raise
            names = {commit.metadata_name(), *self._places.here, *self._made}
            if all(os.path.lexists(view / name) for name in names):
                raise
            raise LoadError(
                f"{view}: somebody has removed what this restore made there; restore again"
            ) from error


def _attempt(do: Callable[[], None], failures: list[Exception]) -> None:
    try:
        do()
    except Exception as error:
        failures.append(error)


def _memory(piece: torch.Tensor) -> memoryview:
    array: Any = piece.numpy()
    return memoryview(array)


def _known(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group


def _union(every: Iterable[Ranges]) -> Ranges:
    """Ranges that cover all of these, and do not overlap."""
    together: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for ranges in every:
        for name, of_file in ranges.items():
            together[name].update(of_file)
    found: Ranges = {}
    for name, places in together.items():
        merged: list[tuple[int, int]] = []
        for offset, length in sorted(places):
            if merged and offset <= sum(merged[-1]) + _GAP_BYTES:
                begin, size = merged[-1]
                merged[-1] = (begin, max(size, offset + length - begin))
            else:
                merged.append((offset, length))
        found[name] = merged
    return found


def _lock_of(view: Path) -> Path:
    return view.with_name(view.name + _LOCK)


def _remove_stale(folder: Path) -> None:
    """Remove the views of restores that were killed."""
    for name in os.listdir(folder):
        if not name.startswith(_VIEW) or not name.endswith(_LOCK):
            continue
        with suppress(OSError):
            descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # Without locks nobody can tell whether a restore still reads it.
                with trying(descriptor, strict=True) as is_stale:
                    if is_stale:
                        shutil.rmtree(folder / name.removesuffix(_LOCK), ignore_errors=True)
                        (folder / name).unlink()
            finally:
                os.close(descriptor)
