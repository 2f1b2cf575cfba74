"""The native engine. Private: use ``pyckpt.Engine`` and what stands on it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Buffer

torch_version: str
cuda: bool

# Sizes that the engine works with, in bytes (csrc/sizes.h).
page_bytes: int
aligned_payload_min_bytes: int
small_source_bytes: int
small_alignment_bytes: int

def crc32(buffer: Buffer, crc: int = 0) -> int:
    """CRC-32 (that of zip) of ``buffer`` appended to bytes whose checksum is ``crc``."""

def crc32_shift(crc: int, size: int) -> int:
    """What bytes of checksum ``crc`` contribute to a checksum when ``size`` bytes follow them:
    ``crc32(a + b) == crc32_shift(crc32(a), len(b)) ^ crc32(b)``."""

def scan_pickle(buffer: Buffer, *, depth: int, work_per_byte: int) -> int:
    """Go through the pickle that ``buffer`` begins with, without reading it; return its length in
    bytes. Raises ValueError for one that is damaged, nested deeper than ``depth``, or takes more
    memory or time than its size explains (csrc/pickle_scan.h)."""

def is_tiling(
    size: tuple[int, ...], offsets: list[tuple[int, ...]], sizes: list[tuple[int, ...]]
) -> bool:
    """Whether each element of a tensor is in exactly one of the boxes; one that is given twice
    counts once. Raises ValueError for boxes that cannot be compared in reasonable time."""

def start_timeline() -> bool:
    """Begin to record what native threads do. Returns False, and does nothing, if that is under
    way."""

def stop_timeline() -> list[tuple[int, str, list[tuple[str, int, int, int]], int]]:
    """End the recording. For each thread: its number in the kernel, its name, its spans, and how
    many had no room. A span is a name, its begin and end in nanoseconds of ``time.monotonic_ns``,
    and its bytes."""

def register_host_memory(device: int, address: int, size: int) -> None:
    """Page-lock host memory for all CUDA devices. The calling thread's current device, its last
    CUDA error, and captures of graphs stay as they are. Raises CudaError, also in a build without
    CUDA.

    Args:
        device: one that the process uses already.
        address: of memory that is there until it is unregistered, and is registered nowhere else.
        size: in bytes.
    """

def unregister_host_memory(device: int, address: int, stream: int) -> None:
    """Wait for what a stream of the device was given so far, and let the memory go. Errors of CUDA
    are ignored. Raises CudaError in a build without CUDA."""

class Envelope:
    """The bytes before and after a tensor's raw bytes; see ``pyckpt.format.envelope``."""

    prefix: bytes
    payload_size: int
    def __init__(
        self,
        *,
        prefix: bytes,
        suffix: bytes,
        payload_size: int,
        crc_positions: Sequence[int],
        id_position: int = 0,
        id_size: int = 0,
        id_hash_position: int = 0,
        id_crc_positions: Sequence[int] = ...,
        crcs_before: Sequence[int] = ...,
        crcs_after: Sequence[int] = ...,
    ) -> None: ...
    def suffix(self, crc: int) -> bytes:
        """The suffix for a payload of checksum ``crc``."""

class WriteStatistics:
    """What a job did so far. Seconds of the four kinds are summed over threads."""

    items: int
    bytes_added: int
    bytes_written: int
    seconds: float
    copy_seconds: float
    checksum_seconds: float
    write_seconds: float
    sync_seconds: float
    slot_waits: int
    direct: bool
    fallback_reason: str

class FillJob:
    """One file on its way to where it goes. For one thread at a time, but for ``statistics``.

    The first error, wherever it happens, is raised from every later call.
    """

    def add_tensor(self, tensor: Tensor, envelope: Envelope) -> bool:
        """Append a tensor. Its memory must not change until ``finish``. Returns False, and does
        nothing, where the tensor is not plain memory."""

    def add_tensors(
        self,
        tensors: Sequence[Tensor | None],
        envelopes: Sequence[Envelope | None],
        begin: int = 0,
    ) -> int:
        """Append tensors from number ``begin`` up to the first that cannot be, or that has no
        envelope. Returns its number, or how many there are. Both must be lists."""

    def add_bytes(self, buffer: Buffer) -> None:
        """Append an item that is these bytes."""

    def finish(self) -> bytes:
        """Wait until the file is where it goes, as a whole. Returns for each item five
        64-bit words: its offset, length, offset of the payload within the item, length of the
        payload, all in bytes, and CRC-32 of the payload."""

    def abandon(self) -> None:
        """Stop, and leave nothing. Idempotent; does nothing after ``finish``."""

    def statistics(self) -> WriteStatistics: ...

class WriteJob(FillJob):
    """One file on its way to disk. ``finish`` returns when it is complete (and durable, with
    ``sync``). A job that is dropped before removes its file.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | bytes,
        *,
        direct: Literal["auto", "require", "off"] = "auto",
        sync: bool = True,
        preallocate: int = 0,
    ) -> None: ...

class StreamJob(FillJob):
    """One file that is given away as bytes, in their order. ``finish`` returns when all is taken.

    One other thread calls ``take`` meanwhile, and any may call ``fail``.
    """

    def __init__(self, engine: Engine) -> None: ...
    def take(self) -> bytes:
        """Wait for the next bytes, a slot's worth at most; none at the end."""

    def fail(self, why: str) -> None:
        """Fail the job, whose other calls then raise RuntimeError."""

class ReadStatistics:
    """What a job did so far. Seconds of the three kinds are summed over threads."""

    ranges: int
    bytes_needed: int
    bytes_read: int
    seconds: float
    copy_seconds: float
    checksum_seconds: float
    read_seconds: float
    slot_waits: int
    direct: bool
    fallback_reason: str

class ReadJob:
    """Ranges of files on their way to memory. For one thread at a time, but for ``statistics``.

    Ranges are numbered in the order they were added."""

    def __init__(
        self,
        engine: Engine,
        *,
        direct: Literal["auto", "require", "off"] = "auto",
        checksum: bool = True,
    ) -> None: ...
    def add_file(self, path: str | bytes) -> int:
        """Open a file; returns its number."""

    def add_tensor(
        self, file: int, offset: int, tensor: Tensor, file_stride: Sequence[int] | None = None
    ) -> int | None:
        """Fill a tensor from ``offset`` bytes on. Its elements stand in the file with the strides
        ``file_stride`` (in elements; row-major order without gaps by default). Returns the number
        of the range; -1 where several were needed, for a box with wide gaps; None, and does
        nothing, where the tensor cannot be filled: it is no plain memory, or on a GPU and not laid
        out as in the file."""

    def add_tensors(
        self, files: Sequence[int], offsets: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[int | None]:
        """``add_tensor`` for each of several, which have no gaps in their files. On an error those
        before the one that it is of were added. All must be lists of one length."""

    def add_buffer(self, file: int, offset: int, buffer: Buffer) -> int:
        """Fill a buffer. Returns the number of the range."""

    def run(self) -> list[int]:
        """Read everything. Returns the CRC-32 of each range, gaps included (0 where the job does
        not checksum)."""

    def statistics(self) -> ReadStatistics: ...

class PeerJob:
    """Copies out of the memory of other processes of the host. For one thread at a time."""

    def __init__(self, engine: Engine) -> None: ...
    def add(self, process: int, address: int, tensor: Tensor) -> None:
        """Fill a contiguous tensor of the host from an address of a process, which must not change
        what is there until ``run`` has returned."""

    def run(self) -> None:
        """Copy everything. Raises OSError (ESRCH, EPERM, EFAULT) where the kernel refuses; some
        bytes are copied then and some are not. If the process has ended and another has its number,
        the bytes mean nothing."""

class PageWatch:
    """Has the kernel note writes to memory (Linux 6.13). For any thread. Knows nothing in a forked
    child. Raises OSError where the kernel does not offer it."""

    def __init__(self) -> None: ...
    def watch(self, tensor: Tensor) -> int:
        """Note from now on whether the memory of a tensor is written. Returns a number by which
        `is_unwritten` is asked; 0: that cannot be had. What overlaps is forgotten."""

    def is_unwritten(self, tensor: Tensor, since: int) -> bool:
        """Whether it is certain that nobody has written there since that `watch`. Not noticed are
        devices that had the memory before; see `pinned`."""

    def forget(self, address: int, since: int) -> None:
        """Watch the memory at an address no more."""

    def close(self) -> None:
        """Watch nothing more."""

    @staticmethod
    def pinned() -> bool:
        """Whether the kernel counts memory of this process that devices may write by themselves."""

def let_peers_read(allowed: bool) -> bool:
    """Where the kernel lets only parents read their children (Yama's ptrace_scope 1): let any
    process of this user read this one, or no other again. False where there is no such rule."""

class PlainReads:
    """The reads of a load that need no Python for each item: tensors that were saved whole, as
    pyckpt saves them, and are wanted whole, in plain memory of the same dtype; and objects that are
    a number, a string, a bool or None. They are of a checkpoint's ``columns``; the objects have
    ``object_bytes`` at most, all together.

    Call ``take``; then, for a few of ``files`` at a time, make a job of them, ``give``, run it and
    ``check``; then take ``objects``."""

    def __init__(self, columns: Columns, *, object_bytes: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def tensor_bytes(self) -> int:
        """How much of tensors is read."""

    def take(self, values: dict[str, Any]) -> list[str]:
        """Take what is plain of a state's values by key, once. Returns the keys of the others, and
        of those that the columns do not have, in their order. Tensors that share memory are left
        to the caller."""

    def names(self) -> list[str]:
        """The keys of what is read."""

    def files(self) -> list[str]:
        """What is read from, in the order of the names."""

    def give(self, job: ReadJob, begin: int, end: int) -> None:
        """Have a job, to which files ``begin`` to ``end`` were added and nothing more, read what
        is in them."""

    def check(self, checksums: list[int]) -> list[tuple[str, str, int, int, int, bool]]:
        """Compare what a job found with what was saved. Returns what differs: the key, the file,
        the offset there, the CRC-32 saved, the one found, whether it is a tensor's."""

    def objects(
        self, envelope_of: Callable[[int], Envelope | None]
    ) -> tuple[list[str], list[Any], list[tuple[str, bytes]]]:
        """The objects, once they are read: keys, and their values; and keys with the bytes of what
        is not plain. ``envelope_of`` makes the envelope of a pickle of a size; None where plain
        objects are not known."""

class StorageSet:
    """Storages of tensors."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add(self, tensors: object) -> None:
        """Take in the tensors found in nested dicts, lists and tuples; of DTensors, the local
        ones."""

class StageStatistics:
    bytes_staged: int
    bytes_streamed: int
    seconds: float

class Staging:
    """Copies of tensors, on their way into the engine's arena.

    Tensors whose storage is in ``guarded`` are copied while the caller goes on; the others before
    this returns, on a CPU, and before later work on the current stream, on a GPU. ``wanted`` has a
    byte for each leaf: those of zero are not copied. ``shared``: to memory that other processes can
    map. What is no tensor, or a tensor that is more than memory, is passed over.
    """

    def __init__(
        self,
        engine: Engine,
        leaves: list[object],
        *,
        guarded: StorageSet | None = None,
        wanted: bytes | None = None,
        shared: bool = False,
    ) -> None: ...
    @property
    def streamed_volatile_bytes(self) -> int:
        """Bytes that found no room, of tensors that are not guarded."""

    def take_tensors(self) -> list[Tensor | None]:
        """For each leaf its copy, whose memory lives as long as it does, or until ``release``; the
        leaf itself where there was no room; a tensor on "meta" where it is not wanted; None where
        it was passed over. Once."""

    def wait(self) -> None:
        """Until all copies are there. Raises what went wrong."""

    def guard(self) -> None:
        """Have what the calling thread does next, and gives its current streams, wait for the
        copies; on a GPU, without waiting itself. Raises what went wrong, after it failed the
        copies."""

    def fail(self, reason: str) -> None:
        """Fail the copies: all waits for them raise, and ``check``, unless they failed before."""

    def check(self) -> None:
        """Raise what went wrong so far."""

    def release_sources(self) -> None:
        """Let go of the memory that was copied, once nothing reads it."""

    def release(self) -> None:
        """Give the copies' memory back, once nothing writes to it, whoever still has tensors."""

    def statistics(self) -> StageStatistics: ...

def shared_memory_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Descriptor, bytes, and where in it the tensor lies, of shared memory that a staging put it
    in."""

class StateTree:
    """The shape of a state dict: containers, keys, and the tensors' dtypes, shapes and strides."""

    def __init__(self, state_dict: object) -> None: ...
    def __len__(self) -> int: ...
    def match(self, state_dict: object) -> list[Any] | None:
        """The leaves of a state dict of this shape, in order; None for one of another shape."""

    def build(self, leaves: list[Any]) -> dict[str, Any]:
        """A state dict of this shape, of plain dicts and lists, with other leaves."""

class Columns:
    """What a checkpoint consists of, without a Python object for each part: csrc/columns.h.

    Keys have numbers, from 0 on. A key is an object, which is one item, or a tensor, which is one
    item for each of its chunks. Items have numbers, too; those of a key follow each other. A file
    has a number and a name. All methods raise IndexError for a number that there is none of, and
    ValueError for a key of another kind, or for numbers of another count, than the call is about.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """How many keys there are."""

    @property
    def item_count(self) -> int: ...
    @property
    def file_count(self) -> int: ...
    def add_file(self, name: str) -> int: ...
    def add_properties(
        self,
        dtype: str,
        layout: str,
        requires_grad: bool,
        memory_format: int,
        pin_memory: bool,
    ) -> int:
        """Return the number of a tensor's properties; equal ones have the same.

        Args:
            dtype: its name in torch, such as ``float32``.
            layout: as torch prints it, such as ``torch.strided``.
            memory_format: DCP's number of it.
        """

    def add_object(self, name: str) -> int: ...
    def add_tensor(self, name: str, properties: int, size: Sequence[int]) -> int: ...
    def add_chunk(self, offsets: Sequence[int], sizes: Sequence[int]) -> int:
        """Add a chunk to the tensor that was added last; return its item."""

    def set_place(
        self,
        item: int,
        file: int,
        offset: int,
        length: int,
        payload_offset: int | None = None,
        payload_length: int | None = None,
        crc32: int | None = None,
    ) -> None: ...
    def set_stride(self, item: int, stride: Sequence[int]) -> None: ...
    def find(self, name: str) -> int:
        """The number of a key; -1 where there is none of that name."""

    def name(self, key: int) -> str: ...
    def is_tensor(self, key: int) -> bool: ...
    def size(self, key: int) -> tuple[int, ...]: ...
    def properties(self, key: int) -> tuple[str, str, bool, int, bool]:
        """The arguments of `add_properties`."""

    def chunk_count(self, key: int) -> int:
        """0 for an object."""

    def first_item(self, key: int) -> int: ...
    def chunk(self, key: int, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a chunk."""

    def find_chunk(self, key: int, offsets: Sequence[int], hint: int = -1) -> int:
        """The number of the chunk that begins there; -1 where none does. A chunk of the number
        ``hint`` is looked at first."""

    def overlaps(
        self, key: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """What the chunks of a tensor have of a box in it. For each chunk that has elements of it,
        in the order of their numbers: the number, where the part begins in the chunk, where it
        begins in the box, and its size."""

    def place(
        self, item: int
    ) -> tuple[str, int, int, int | None, int | None, int | None, tuple[int, ...] | None]:
        """File, offset and length of an item; offset and length of its payload, its CRC-32 and its
        strides (None: row-major), as docs/format.md has them."""

    def file_sizes(self) -> dict[str, int]:
        """The least bytes that each file must have."""

class MetadataNames:
    """How this torch names what a pickle of metadata speaks of: classes and functions by module and
    name, dtypes with the bytes of an element, layouts."""

    def __init__(
        self,
        *,
        metadata: tuple[str, str],
        storage_meta: tuple[str, str],
        tensor: tuple[str, str],
        bytes: tuple[str, str],
        chunk: tuple[str, str],
        index: tuple[str, str],
        properties: tuple[str, str],
        info: tuple[str, str],
        size: tuple[str, str],
        layout: tuple[str, str],
        memory_format: tuple[str, str],
        dtypes: dict[str, int],
        layouts: Sequence[str],
    ) -> None: ...

def encode_metadata(
    columns: Columns,
    names: MetadataNames,
    write: Callable[[bytes], object],
    *,
    planner_data: bytes,
    checkpoint_id: bytes | None,
    save_id: bytes | None,
    version: bytes | None,
) -> tuple[int, int]:
    """Write the pickle of metadata (csrc/metadata_encoder.h), without the trailer.

    Args:
        write: is given the bytes in order, about a MiB at a time.
        planner_data: what Python's pickler makes of it with protocol 3, without the first two
            bytes and the last.
        checkpoint_id, save_id, version: UTF-8.

    Returns the number of bytes and their CRC-32. Raises ValueError where the columns do not say
    where items are, and whatever ``write`` raises.
    """

def decode_metadata(
    buffer: Buffer, names: MetadataNames
) -> tuple[Columns, bytes, bytes | None, bytes | None, bytes | None] | None:
    """Read what `encode_metadata` wrote: columns, planner_data, checkpoint_id, save_id and version.

    None for any other bytes, also for those from which no checkpoint can be loaded. Paths alone are
    not checked. What planner_data is a pickle of is None, or a dict of strings to tuples of strings
    and whole numbers, and reading it calls nothing."""

def columns_from(
    keys: dict[str, Any],
    places: dict[Any, Any],
    *,
    types: dict[str, type],
    dtypes: dict[torch.dtype, str],
    layouts: dict[torch.layout, str],
    memory_formats: dict[torch.memory_format, int],
) -> Columns | None:
    """Take down in columns what DCP's objects say of a checkpoint.

    Args:
        keys, places: ``state_dict_metadata`` and ``storage_data`` of its metadata.
        types: DCP's classes, by "tensor", "bytes", "chunk", "index", "properties" and "info".
        dtypes, layouts, memory_formats: the names and numbers that columns have for them.

    None where an object is of another class or knows more than stock's, and where an item has no
    place, or a place no item."""

class Engine:
    def __init__(
        self, *, slot_bytes: int, slots: int, io_threads: int, arena_bytes: int
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def arena_max_bytes(self) -> int: ...
    @property
    def arena_held_bytes(self) -> int: ...
    @property
    def arena_used_bytes(self) -> int: ...
    def prewarm(
        self, bytes: int, *, shared: bool, devices: list[int], background: bool = False
    ) -> None:
        """Have so many bytes free in the arena, as far as its budget goes, and their pages there;
        with CUDA devices, registered with CUDA, and each device ready to copy. In the
        ``background`` it goes on after the call, until `close`, and tells of no error."""

    def wait_prewarmed(self) -> None:
        """Wait until nothing is prewarmed in the background."""

    def close(self) -> None: ...

# --- plans of saves -------------------------------------------------------------------------------

class PlanPacker:
    """Packs what one rank has into a block. Each call raises ValueError or TypeError for what
    cannot be in one; the packer is of no use then.

    A ``path`` is that of DCP's ``planner_data``; joined with dots it must be the name. A ``hint``
    is the ``index`` of DCP's `MetadataIndex`."""

    def __init__(self) -> None: ...
    def add_properties(
        self,
        dtype: str,
        layout: str,
        requires_grad: bool,
        memory_format: int,
        pin_memory: bool,
        element_size: int,
    ) -> int:
        """Returns a number that stands for the properties of tensors."""

    def add_object(self, name: str, path: tuple[Any, ...] | None, hint: int | None) -> None: ...
    def add_tensor(
        self,
        name: str,
        path: tuple[Any, ...] | None,
        is_shard: bool,
        properties: int,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        hint: int | None,
    ) -> None: ...
    def add_path(self, name: str, path: tuple[Any, ...]) -> None:
        """Of a key that may have no item here. Does nothing for one that has."""

    def finish(self) -> bytes: ...

class PlanBlock:
    """A block, to be looked into. Raises ValueError for one that is damaged, or of another version
    of pyckpt."""

    def __init__(self, block: bytes) -> None: ...
    def __len__(self) -> int: ...
    def item(self, index: int) -> tuple[Any, ...]:
        """Its kind (1: an object; 2: a tensor; 3: a shard), name and hint; and of a tensor its
        properties as `Columns` has them, shape, offsets and sizes, which are None of an object."""

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """The path of each key that has one."""

class GlobalPlan:
    """The plan of all ranks (csrc/global_plan.h). Raises ValueError, which names the rank, for a
    block that is damaged or of another version. What takes a rank raises IndexError where there is
    no such rank, and ValueError where there are conflicts or errors.

    Args:
        blocks: of each rank.
        wrote: of each rank that goes by a plan that is known, a byte an item: whether the rank
            wrote it by that plan. None of the others.
    """

    conflicts: list[str]
    """What ranks contradict each other about; the plan must not be used where there is any."""
    errors: list[str]
    """What is wrong with chunks; the plan must not be used where there is any."""
    columns: Columns
    memory_bytes: int
    """About what it takes, with the columns."""
    def __init__(self, blocks: Sequence[bytes], wrote: Sequence[bytes | None]) -> None: ...
    def written(self, rank: int) -> int:
        """How many items a rank writes."""

    def answer(self, rank: int) -> bytes:
        """What to tell a rank; see `unpack_answer`."""

    def wrote(self, rank: int) -> bytes:
        """For each item of a rank, whether it writes it: a byte."""

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """The paths of all keys, as DCP joins those of the ranks."""

    def place(self, rank: int, file: str, results: bytes) -> None:
        """Say in the columns where the items lie that a rank wrote. Raises ValueError for results
        that are damaged, or of other items."""

def unpack_answer(answer: bytes, items: int) -> list[int]:
    """For each of a rank's items: 0 where another rank writes it, or one more than the number that
    its chunk has. Raises ValueError for an answer to a rank of another number of items."""

def pack_places(
    places: bytes, recorded: bytes, strides: Sequence[tuple[int, tuple[int, ...]]]
) -> bytes:
    """Pack what a rank wrote.

    Args:
        places: of each item, as ``WriteJob.finish`` returns them.
        recorded: a byte an item: whether the metadata has its true dtype and shape, so that its
            payload and checksum are told.
        strides: of items whose payload is not in row-major order.
    """

def pack_checksums(before: bytes, places: bytes) -> bytes | None:
    """Pack the checksums alone; None where anything else differs between the places of two
    saves."""

def unpack_places(results: bytes) -> list[tuple[Any, ...]]:
    """Of each item its offset, length, payload's offset and length, CRC-32 and stride, of which the
    last four may be None. Raises ValueError for bytes that are damaged."""

def unpack_checksums(results: bytes) -> list[int]:
    """Raises ValueError for bytes that are damaged."""
