"""A mirror in an object store."""

from __future__ import annotations

import errno
import os
import re
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.errors import PyckptError, Superseded
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.remote.address import telling
from pyckpt.remote.objects import PIECE_BYTES, Objects
from pyckpt.train.store.catalog import CheckpointInfo, read_note
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.names import DEFAULT, Naming
from pyckpt.train.store.retention import Retention, surplus
from pyckpt.train.tiers.tier import REUSE_STEPS

__all__ = ["BucketTier"]

# What stores copy at once, S3 first; they answer so to more.
_COPY_BYTES_MAX = 5 << 30
_TOO_LARGE = re.compile(r"EntityTooLarge|InvalidRequest|\b413\b")

_GENERATION = re.compile(r"generation-(\d{8,})")

# What a URL does not keep as it is, or no object's name may have.
_NOT_IN_A_URL = re.compile(r"[%#?\\\x00-\x1f\x7f\ud800-\udfff]|^ | $")


@dataclass(frozen=True)
class _Known:
    """What a metadata object says, as long as it is that object."""

    tag: str
    files: dict[str, int]
    metadata: Metadata | None
    """Until it is known what the checkpoint says of itself."""
    checkpoint: CheckpointInfo | None


class BucketTier:
    """A `Tier` of objects below one URL.

    An object is there as a whole or not at all, so a data object needs no other name until it is
    complete. A conditional write of ``.metadata`` is the commit. Which job may write is decided as
    in a directory (`Fence`): by objects ``.pyckpt/generation-00000007``, each of which only one job
    can create.

    Args:
        url: as for ``pyckpt.remote.address.open_store``.
        root: the directory that it mirrors.
        naming: the names of the checkpoints in both.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the URL is of no kind that obstore knows, or the names cannot be in a URL.
    """

    def __init__(self, url: str, root: Path, naming: Naming = DEFAULT) -> None:
        if _NOT_IN_A_URL.search(naming.pattern):
            raise ValueError(
                f"naming={naming.pattern!r} makes names that a URL such as {url} cannot end in. "
                "For a mirror in an object store, leave out '%', '#', '?', '\\', control "
                "characters, and spaces at the ends"
            )
        self._token = uuid.uuid4().hex
        self._url = url.rstrip("/")
        self._naming = naming
        self._root = root
        self._objects = Objects(self._url)
        self._generation: int | None = None
        self._known: dict[int, _Known] = {}

    def __str__(self) -> str:
        return self._url

    def place(self, step: int) -> str:
        return f"{self._url}/{self._naming.name(step)}"

    def join(self, token: str) -> None:
        self._token = token

    def begin(self) -> None:
        self._fence()

    def holder(self) -> str | None:
        newest = max(self._generations(), default=None)
        found = None
        if newest is not None:
            found = self._objects.read(f"{FOLDER}/generation-{newest:08d}")
        if found is None:
            return None  # nobody has begun, or a later one has just been taken
        return found[0].decode("utf-8", "replace").rpartition(" ")[2]

    def upload(self, step: int, file: Path, passing: Callable[[int], None]) -> None:
        name = f"{self._naming.name(step)}/{file.name}"
        self._mark(step)
        size = file.stat().st_size
        self._objects.put_pieces(name, _pieces(file, size, passing), expected=size)

    def _mark(self, step: int) -> None:
        """Say that a step's data objects, without metadata, are those of an upload."""
        self._objects.put(f"{self._naming.name(step)}/{commit.mark_name()}", b"")

    def reuse(self, step: int, name: str, size: int) -> bool:
        others = sorted((one for one in self._steps() if one != step), reverse=True)
        for other in others[:REUSE_STEPS]:
            if self.sizes(other).get(name) != size:
                continue
            self._mark(step)
            source, target = (f"{self._naming.name(one)}/{name}" for one in (other, step))
            try:
                self._objects.copy(source, target)
            except FileNotFoundError:
                return False  # gone meanwhile; it is uploaded
            except OSError as error:
                if size <= _COPY_BYTES_MAX and not _TOO_LARGE.search(str(error)):
                    raise  # it is tried again: an upload of all would be far more than a copy
                return False
            return True
        return False

    def sizes(self, step: int) -> dict[str, int]:
        return self._objects.list(f"{self._naming.name(step)}/")

    def commit(self, step: int, metadata: bytes, files: Collection[str]) -> None:
        self._fence()
        folder = self._naming.name(step)
        name = f"{folder}/{commit.metadata_name()}"
        found = self._objects.read(name)
        replaced = set() if found is None else _files_of(found[0], name)
        # In a store without conditions the fence alone keeps jobs apart.
        self._objects.replace(name, metadata, None if found is None else found[1])
        gone = {commit.mark_name(), *(replaced - set(files))}
        self._objects.delete(f"{folder}/{one}" for one in gone)

    def newest(
        self, limit: int | None = None, without: Collection[int] = ()
    ) -> CheckpointInfo | None:
        for step in sorted(self._steps(), reverse=True):
            if (limit is None or step <= limit) and step not in without:
                found = self._examine(step)
                if found is not None:
                    return found
        return None

    def damaged(self) -> list[int]:
        steps = self._steps()
        committed = [step for step in steps if commit.metadata_name() in self.sizes(step)]
        return [step for step in committed if self._examine(step) is None]

    def checkpoints(self) -> list[CheckpointInfo]:
        found = (self._examine(step) for step in sorted(self._steps()))
        return [one for one in found if one is not None]

    def prune(
        self,
        retention: Retention,
        *,
        committed: int,
        coming: Collection[int],
        passed: Callable[[int], bool],
    ) -> list[int]:
        if retention.keep_last is None:
            return []
        self._fence()
        steps = [step for step in self._steps() if step not in coming and not passed(step)]
        examined = {step: self._examine(step) for step in steps}
        valid = [one for one in examined.values() if one is not None]
        newest = max((one.step for one in valid), default=-1)
        going = surplus(valid, retention, protected=(committed,))
        leftover = [
            step
            for step, one in examined.items()
            if one is None and step < newest and self._is_leftover(step)
        ]
        for step in [*leftover, *going]:
            folder = self._naming.name(step)
            # First what makes it count; after that it is what an upload has left.
            self._mark(step)
            self._objects.delete([f"{folder}/{commit.metadata_name()}"])
            self._objects.delete(f"{folder}/{name}" for name in self.sizes(step))
            self._known.pop(step, None)
        return going

    def _is_leftover(self, step: int) -> bool:
        """Whether all that is there of a step is what an interrupted upload, or removal, left."""
        names = self.sizes(step)
        return commit.mark_name() in names and all(map(commit.is_part, names))

    # --- what is there ---

    def _steps(self) -> list[int]:
        import obstore

        with telling(self._url):
            listed = obstore.list_with_delimiter(self._objects.store)
        names = (path.rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])
        return [step for step in map(self._naming.step_of, names) if step is not None]

    def _examine(self, step: int) -> CheckpointInfo | None:
        """The checkpoint of a step, if it is valid: its metadata is complete, and each object that
        it names has its size. Damage in it raises no error."""
        import obstore

        name = f"{self._naming.name(step)}/{commit.metadata_name()}"
        try:
            with telling(f"{self._url}/{name}"):
                found = obstore.get(self._objects.store, name)
                tag = found.meta["e_tag"] or str(found.meta["last_modified"])
                known = self._known.get(step)
                if known is None or known.tag != tag:
                    if found.meta["size"] > metadata_format.SIZE_MAX:
                        return None
                    known = self._read(step, tag, bytes(found.bytes()))
            sizes = self.sizes(step)
            if any(sizes.get(file) != size for file, size in known.files.items()):
                return None
            if known.checkpoint is None:
                known = self._with_note(step, known)
        except (FileNotFoundError, PyckptError):
            return None
        self._known[step] = known
        return known.checkpoint

    def _read(self, step: int, tag: str, data: bytes) -> _Known:
        place = self.place(step)
        metadata = metadata_format.decode(data, path=f"{place}/{commit.metadata_name()}")
        return _Known(tag, metadata_format.data_files(metadata), metadata, None)

    def _with_note(self, step: int, known: _Known) -> _Known:
        """With what the checkpoint says of itself; once its objects are known to be there."""
        place = self.place(step)
        metadata, files = known.metadata, known.files
        assert metadata is not None
        final, metrics = read_note(place, metadata, step, partial(self._range, place))
        checkpoint = CheckpointInfo(
            step,
            self._root / self._naming.name(step),
            final=final,
            metrics=metrics,
            bytes=sum(files.values()),
            mirror=place,
            is_local=False,
            save_id=None if metadata.storage_meta is None else metadata.storage_meta.save_id,
        )
        return _Known(known.tag, files, None, checkpoint)

    def _range(self, place: str, name: str, offset: int, length: int) -> bytes:
        import obstore

        path = f"{place.removeprefix(self._url)[1:]}/{name}"
        with telling(f"{place}/{name}"):
            return bytes(obstore.get_range(self._objects.store, path, start=offset, length=length))

    # --- which job may write ---

    def _fence(self) -> None:
        """Raise if another job has begun to write there since this one did. The first time, begin.

        Raises:
            Superseded: another job has.
        """
        generations = self._generations()
        newest = max(generations, default=0)
        if self._generation is None:
            self._generation = self._take(newest)
            older = [n for n in generations if n < self._generation]
            self._objects.delete([f"{FOLDER}/generation-{n:08d}" for n in older])
        elif newest != self._generation:
            raise Superseded(
                f"{self._url}: another job has begun to write there since this job did, so this "
                "one no longer does. If it is the one that should, end the other and start it again"
            )

    def _take(self, newest: int) -> int:
        import obstore

        content = f"{socket.gethostname()} {os.getpid()} {self._token}".encode()
        while True:
            newest += 1
            name = f"{FOLDER}/generation-{newest:08d}"
            try:
                with telling(f"{self._url}/{name}"):
                    obstore.put(
                        self._objects.store, name, content, mode="create", use_multipart=False
                    )
            except FileExistsError:
                continue  # another job has it
            except NotImplementedError:
                obstore.put(self._objects.store, name, content, use_multipart=False)
            return newest

    def _generations(self) -> list[int]:
        matches = map(_GENERATION.fullmatch, self._objects.list(f"{FOLDER}/"))
        return [int(match[1]) for match in matches if match is not None]


def _files_of(data: bytes, name: str) -> set[str]:
    """The data files that a ``.metadata`` names; none if it is damaged."""
    try:
        return set(metadata_format.data_files(metadata_format.decode(data, path=name)))
    except PyckptError:
        return set()


def _pieces(file: Path, size: int, passing: Callable[[int], None]) -> Iterator[bytes]:
    with open(file, "rb", buffering=0) as reader:
        at = 0
        while at < size:
            count = min(PIECE_BYTES, size - at)
            passing(count)
            piece = os.pread(reader.fileno(), count, at)
            if not piece:
                raise OSError(
                    errno.EIO, f"{size} bytes were expected, and it ends at {at}", str(file)
                )
            at += len(piece)
            yield piece
