"""A mirror in an object store."""

from __future__ import annotations

import errno
import os
import re
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
        self._replaced: dict[int, set[str]] = {}  # by step, data files that are still to be removed
        self._is_swept = False

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
        # None also if a later one has just been taken.
        return None if newest is None else self._holder_of(newest)

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
        folder = self._naming.name(step)
        name, mark = (f"{folder}/{one}" for one in (commit.metadata_name(), commit.mark_name()))
        found = self._objects.read(name)
        if found is not None:
            # Also those of an attempt that failed after its commit.
            self._replaced.setdefault(step, set()).update(_files_of(found[0], name))
        replaced = self._replaced.get(step, set()) - set(files)
        if replaced:
            # A kill after the commit leaves them: by this, the next job knows them (`_sweep`).
            self._objects.put(mark, "\n".join(sorted(replaced)).encode())
        # After the read. So what another job commits that begins after this look is another version
        # than the one that is replaced. In a store without conditions, the fence alone keeps jobs
        # apart.
        self._fence()
        self._objects.replace(name, metadata, None if found is None else found[1])
        if replaced:
            self._fence()  # a job that has begun since may use files of frozen parts again
        self._objects.delete([mark, *(f"{folder}/{one}" for one in replaced)])
        self._replaced.pop(step, None)

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
        staying: Collection[int],
        passed: Callable[[int], bool],
    ) -> list[int]:
        if retention.keep_last is None:
            return []
        self._fence()
        steps = [step for step in self._steps() if step not in staying and not passed(step)]
        examined = {step: self._examine(step) for step in steps}
        tags = {step: self._known[step].tag for step, one in examined.items() if one is not None}
        valid = [one for one in examined.values() if one is not None]
        newest = max((one.step for one in valid), default=-1)
        going = surplus(valid, retention, protected=(committed,))
        leftover = [step for step, one in examined.items() if one is None and step < newest]
        removed = [
            step
            for step in [*leftover, *going]
            if step not in staying and self._remove(step, tags.get(step))
        ]
        if not self._is_swept:
            for step in tags.keys() - set(removed):
                if step not in staying:
                    self._sweep(step, self._known[step].files)
            self._is_swept = True
        return [step for step in going if step in removed]

    def _remove(self, step: int, tag: str | None) -> bool:
        """Remove a checkpoint, or what an interrupted upload, or removal, has left.

        Args:
            tag: of the checkpoint's metadata; None for what has none.

        Returns:
            Whether it did. It leaves alone what is not, or no longer, what the caller has seen.

        Raises:
            Superseded: another job has begun to write there.
        """
        folder = self._naming.name(step)
        names = self.sizes(step)
        if tag is None:
            if commit.mark_name() not in names or not all(map(commit.is_part, names)):
                return False
        elif self._tag(f"{folder}/{commit.metadata_name()}") != tag:
            return False  # it was saved again
        # After the looks above. So no job that could save the step again had begun by then. One
        # that begins after this look, and commits the step before the deletions, loses its
        # metadata: few stores delete on a condition. Its data has other names than what is listed
        # here, except for files of frozen parts.
        self._fence()
        # First what makes it count; after that it is what an upload has left.
        self._mark(step)
        if tag is not None:
            self._objects.delete([f"{folder}/{commit.metadata_name()}"])
        gone = {*names, commit.mark_name()} - {commit.metadata_name()}
        self._objects.delete(f"{folder}/{name}" for name in gone)
        self._known.pop(step, None)
        return True

    def _sweep(self, step: int, files: Collection[str]) -> None:
        """Remove what a checkpoint has replaced, if the job that committed it was interrupted.

        Args:
            files: the names of the data files that its metadata names.
        """
        folder = self._naming.name(step)
        mark = f"{folder}/{commit.mark_name()}"
        said = self._objects.read(mark)
        if said is None or not said[0]:
            return  # nothing was, or the mark is that of another upload
        lines = said[0].decode("utf-8", "replace").split("\n")
        replaced = {name for name in lines if commit.is_data_file(name, None)}
        self._fence()
        self._objects.delete([mark, *(f"{folder}/{one}" for one in replaced - set(files))])

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
                tag = _tag_of(found.meta)
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

    def _tag(self, name: str) -> str | None:
        """What tells an object from others of its name; None if there is none."""
        import obstore

        try:
            with telling(f"{self._url}/{name}"):
                return _tag_of(obstore.head(self._objects.store, name))
        except FileNotFoundError:
            return None

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
        if self._generation is None:
            self._generation = self._take(max(generations, default=0))
        elif not self._is_newest(self._generation, generations):
            raise Superseded(
                f"{self._url}: another job has begun to write there since this job did, so this "
                "one no longer does. If it is the one that should, end the other and start it again"
            )
        older = [n for n in generations if n < self._generation]
        if older:
            with suppress(OSError):  # they do no harm, and the next look tries again
                self._objects.delete(map(_generation_name, older))

    def _is_newest(self, own: int, generations: Collection[int]) -> bool:
        """Whether no other job has begun since this one did.

        Args:
            own: the generation of this job.
            generations: those that are there.
        """
        if max(generations, default=0) > own:
            return False
        holder = self._holder_of(own)
        if holder is None and not generations:
            # A rule of the bucket, or a person, has removed all of them. One that is there would be
            # of a job that has begun after that.
            return self._make(own)
        return holder == self._token

    def _take(self, newest: int) -> int:
        while not self._make(newest := newest + 1):
            pass  # another job has it
        return newest

    def _make(self, generation: int) -> bool:
        """Make the object of a generation. Returns whether it is this job's, and not another's."""
        import obstore

        content = f"{socket.gethostname()} {os.getpid()} {self._token}".encode()
        name = _generation_name(generation)
        try:
            with telling(f"{self._url}/{name}"):
                obstore.put(self._objects.store, name, content, mode="create", use_multipart=False)
        except FileExistsError:
            # Also if the answer to the first request was lost, and obstore has repeated it.
            return self._holder_of(generation) == self._token
        except NotImplementedError:
            self._objects.put(name, content)
        return True

    def _holder_of(self, generation: int) -> str | None:
        """The token of the job that has a generation; None if none has."""
        found = self._objects.read(_generation_name(generation))
        return None if found is None else found[0].decode("utf-8", "replace").rpartition(" ")[2]

    def _generations(self) -> list[int]:
        matches = map(_GENERATION.fullmatch, self._objects.list(f"{FOLDER}/"))
        return [int(match[1]) for match in matches if match is not None]


def _generation_name(generation: int) -> str:
    return f"{FOLDER}/generation-{generation:08d}"


def _tag_of(meta: Any) -> str:
    """From what obstore says of an object."""
    return meta["e_tag"] or str(meta["last_modified"])


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
