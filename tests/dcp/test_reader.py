"""DirectReader in one process: it reads what we and stock saved, into whatever tensor."""

from __future__ import annotations

import errno
import io
import math
import os
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import examples, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem

import pyckpt
from pyckpt.dcp import filling
from pyckpt.dcp.checking import Check
from pyckpt.errors import EngineClosed, LoadError
from pyckpt.format.item import Payload
from pyckpt.private import StorageInfo

MIB = 1 << 20
# More of it than tests/conftest.py's profile, if there is one, would ask for.
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip

WRITERS: dict[str, Callable[[Path], dcp.StorageWriter]] = {
    "ours": lambda path: pyckpt.DirectWriter(path, sync_files=False),
    "stock": lambda path: FileSystemWriter(path, sync_files=False),
    "stock-3-threads": lambda path: FileSystemWriter(path, sync_files=False, thread_count=3),
    "stock-file-a-tensor": lambda path: FileSystemWriter(
        path, sync_files=False, single_file_per_rank=False
    ),
}
each_writer = pytest.mark.parametrize("writer", WRITERS)
ours_and_stock = pytest.mark.parametrize("writer", ["ours", "stock"])


def save(state: dict[str, Any], path: Path, writer: str = "ours") -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # by stock
        dcp.save(state, storage_writer=WRITERS[writer](path), no_dist=True)


def load(state: dict[str, Any], path: Path, **options: Any) -> pyckpt.DirectReader:
    """Load by DCP's function and planner; return the reader."""
    reader = pyckpt.DirectReader(path, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


@pytest.fixture(params=[slow(1), 4], ids=lambda threads: f"{threads}-threads")
def tiny_engine(request: pytest.FixtureRequest) -> Iterator[pyckpt.Engine]:
    """Everything spans slots, and there are few of them."""
    with pyckpt.Engine(
        slot_bytes=4096, max_pinned_bytes=3 * 4096, io_threads=request.param
    ) as engine:
        yield engine


def patterned(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor of bytes that differ from place to place."""
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return (raw % 2 == 0).reshape(tuple(shape))
    return raw.view(dtype).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: of random ones, some are NaN, which equals nothing."""
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if expected.is_quantized:
        assert found.q_scale() == expected.q_scale()
        assert torch.equal(found.int_repr(), expected.int_repr())
    else:
        assert torch.equal(bits(found), bits(expected))


def quantised(values: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it will go
        return torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)


def everything() -> dict[str, Any]:
    """All kinds of tensors that stock saves."""
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        state[name] = patterned((5, 7), dtype)
        state[f"{name}/0-d"] = patterned((), dtype)
        state[f"{name}/transposed"] = patterned((3, 11), dtype).t()
    image = patterned((2, 3, 5, 4))
    return state | {
        "empty": torch.empty(0),
        "empty/2-d": torch.empty(3, 0),
        "channels_last": image.to(memory_format=torch.channels_last),
        "permuted": image.permute(2, 0, 3, 1),
        "strided": patterned((40, 6))[3:30:2, 1:4],
        "column": patterned((300, 2))[:, 1],
        "ones": patterned((1, 6, 1)),
        "odd strides": patterned((6,)).as_strided((1, 6, 1), (99, 1, 7)),
        "parameter": torch.nn.Parameter(patterned((4, 4))),
        "quantised": quantised(torch.arange(9.0).reshape(3, 3)),
        "conjugated": patterned((4, 2), torch.complex64).conj(),
        "negated": patterned((6,), torch.complex64).conj().imag,
        "large": patterned((300, 1001), torch.int16),
        "large/transposed": patterned((301, 1001), torch.int16).t(),
        "object": (1, "b", None),
    }


def blank(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_quantized:
        return quantised(torch.zeros(value.shape))
    return torch.zeros(value.shape, dtype=value.dtype)


# --- what is read ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("written")
    state = everything()
    save(state, path, request.param)
    return request.param, path, state


# Of torch.load, of a quantised tensor.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("direct", ["auto", slow("off")])
def test_everything(
    written: tuple[str, Path, dict[str, Any]], direct: Any, tiny_engine: pyckpt.Engine
) -> None:
    writer, path, saved = written
    for engine in (None, tiny_engine):
        state = {key: blank(value) for key, value in saved.items()}
        reader = load(state, path, direct=direct, engine=engine)
        for key, value in saved.items():
            if isinstance(value, torch.Tensor):
                assert_same(state[key], value)
        assert state["object"] == saved["object"]
        assert reader.unverified == ([] if writer == "ours" else ["object"])
        stock = {key: blank(value) for key, value in saved.items()}
        dcp.load(stock, storage_reader=FileSystemReader(path), no_dist=True)
        for key, value in stock.items():
            if isinstance(value, torch.Tensor):
                assert_same(state[key], value)


def test_everything_is_created(written: tuple[str, Path, dict[str, Any]]) -> None:
    """pyckpt.load makes each tensor that it is given none for, from the metadata."""
    writer, path, saved = written
    # What is made for a quantised one has no scale; it is loaded as the values that it stands for.
    state: dict[str, Any] = {key: None for key in saved if key != "quantised"}
    report = pyckpt.load(state, path)
    for key in state:
        if isinstance(saved[key], torch.Tensor):
            assert_same(state[key], saved[key].detach())
    assert state["object"] == saved["object"]
    assert sorted([*report.filled, *report.loaded]) == sorted(state)
    assert len(report.filled) == sum(isinstance(saved[key], torch.Tensor) for key in state)
    assert report.not_verified == ([] if writer == "ours" else ["object"])
    assert report.bytes > 2 * 300 * 1001 * 2


def test_sparse_tensors(tmp_path: Path) -> None:
    """Stock saves none. What is copied to the detached half of one does not arrive in it."""
    saved = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    save({"t": saved}, tmp_path)
    for loaded in (lambda s: load(s, tmp_path), lambda s: pyckpt.load(s, tmp_path)):
        state = {"t": torch.zeros(2, 2).to_sparse()}
        loaded(state)
        assert torch.equal(state["t"].to_dense(), saved.to_dense())
        with pytest.raises(BaseException, match="between dense and sparse"):
            loaded({"t": torch.zeros(2, 2)})


DESTINATIONS: dict[str, Callable[[torch.Size], torch.Tensor]] = {
    "contiguous": lambda size: torch.zeros(size),
    "transposed": lambda size: torch.zeros(size[::-1]).permute(*range(len(size))[::-1]),
    "every second": lambda size: torch.zeros([2 * n for n in size])[(slice(None, None, 2),) * 3],
    "inside": lambda size: torch.zeros([n + 2 for n in size])[(slice(1, -1),) * 3],
    "misaligned": lambda size: torch.zeros(size.numel() + 1)[1:].view(size),
    "parameter": lambda size: torch.nn.Parameter(torch.zeros(size)),
    "other dtype": lambda size: torch.zeros(size, dtype=torch.float64),
    "other dtype, transposed": lambda size: torch.zeros(size[::-1], dtype=torch.bfloat16).permute(
        *range(len(size))[::-1]
    ),
    "other dtype, inside": lambda size: torch.zeros([n + 2 for n in size], dtype=torch.int32)[
        (slice(1, -1),) * 3
    ],
    "negated": lambda size: torch.zeros(size, dtype=torch.complex64).conj().imag,
}
ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)]


@ours_and_stock
@pytest.mark.parametrize("kind", DESTINATIONS)
def test_destinations(tmp_path: Path, writer: str, kind: str, tiny_engine: pyckpt.Engine) -> None:
    saved = {}
    for size in ((4, 3, 5), (1, 33, 41), (2, 1, 7)):
        for order in ORDERS:
            values = torch.arange(float(math.prod(size))).reshape(size).permute(order)
            saved[f"{size} {order}"] = values
    save(saved, tmp_path, writer)
    for engine in (None, tiny_engine):
        state = {key: DESTINATIONS[kind](values.shape) for key, values in saved.items()}
        reader = load(state, tmp_path, engine=engine)
        assert reader.unverified == []
        for key, values in saved.items():
            assert_same(state[key], values.to(state[key].dtype))
            # Nothing was written beside the view.
            whole = memory_around(state[key])
            assert whole.count_nonzero() == state[key].count_nonzero(), key


def memory_around(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if tensor.is_neg():
        return tensor.detach()
    return tensor.detach().as_strided((count,), (1,), 0)


@ours_and_stock
def test_expanded_destination(tmp_path: Path, writer: str) -> None:
    """Many elements cannot be loaded into one; stock says so too."""
    save({"t": torch.arange(4.0)}, tmp_path, writer)
    with pytest.raises(LoadError, match="single memory location"):
        pyckpt.load({"t": torch.zeros(1).expand(4)}, tmp_path)
    save({"t": torch.arange(1.0) + 5}, tmp_path, writer)
    state = {"t": torch.zeros(()).expand(1)}
    pyckpt.load(state, tmp_path)
    assert state["t"].item() == 5


@pytest.mark.parametrize("writer", ["ours", slow("stock")])
def test_large_conversions(tmp_path: Path, writer: str) -> None:
    """Temporary memory is 32 MiB: what is larger is read in rows."""
    # Rows that are, and that are not, a divisor of 32 MiB; few large and many small ones.
    saved = {
        "a": torch.arange(9 * MIB, dtype=torch.int32).reshape(9, MIB),
        "b": torch.arange(34 * MIB, dtype=torch.int32).to(torch.int8)[:34_000_001],
        "c": torch.arange(40_000 * 211, dtype=torch.int32).reshape(40_000, 211),
    }
    save(saved, tmp_path, writer)
    state = {
        "a": torch.zeros(9, MIB, dtype=torch.int64),
        "b": torch.zeros(34_000_001, 2, dtype=torch.int16)[:, 1],
        "c": torch.zeros(211, 40_000, dtype=torch.int64).t(),
    }
    reader = load(state, tmp_path)
    for key, values in saved.items():
        assert torch.equal(state[key], values.to(state[key].dtype)), key
    assert reader.unverified == []
    needed = sum(values.nbytes for values in saved.values())
    assert reader.statistics.bytes_needed >= needed
    assert reader.statistics.bytes <= needed * 1.01


def test_large_transposed_conversion(tmp_path: Path) -> None:
    """The parts of such a one do not lie one after another in the file; it says so."""
    saved = torch.arange(9 * MIB, dtype=torch.int32).reshape(MIB, 9).t()
    save({"t": saved}, tmp_path)
    state = {"t": torch.zeros(9, MIB, dtype=torch.int64)}
    reader = load(state, tmp_path)
    assert torch.equal(state["t"], saved.long())
    assert reader.unverified == ["t"]


SIZES = [0, 1, 2, 4095, 4096, 4097, 8191, 8192, 8193, 12287, 12288, 12289, 65535, 65536, 65537]
PRIMES = [7, 127, 4093, 4099, 10_007, 65_521, 65_539, 262_147]


@pytest.mark.parametrize("threads", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_sizes(tmp_path: Path, threads: int, direct: Any) -> None:
    saved = {f"{n}": patterned((n,), torch.uint8) for n in SIZES + PRIMES}
    saved |= {f"{n} again": patterned((n,), torch.uint8) + 1 for n in SIZES}
    for writer in ("ours", "stock"):
        save(saved, tmp_path / writer, writer)
        with pyckpt.Engine(
            slot_bytes=4096, max_pinned_bytes=4096 * threads, io_threads=threads
        ) as engine:
            for offset in (0, 1):
                state = {
                    key: torch.zeros(len(values) + offset, dtype=torch.uint8)[offset:]
                    for key, values in saved.items()
                }
                reader = load(state, tmp_path / writer, engine=engine, direct=direct)
                for key, values in saved.items():
                    assert torch.equal(state[key], values), (writer, key)
                assert reader.unverified == []


@pytest.mark.parametrize("direct", ["auto", slow("off")])
@pytest.mark.parametrize("slot", [4096, slow(64 << 10), 8 * MIB])
def test_sizes_that_are_read_in_place(tmp_path: Path, direct: Any, slot: int) -> None:
    sizes = [MIB - 1, MIB, MIB + 4097, 2_000_003]
    saved = {f"{n}": patterned((n,), torch.uint8) for n in sizes}
    for writer in ("ours", "stock"):
        save(saved, tmp_path / writer, writer)
        with pyckpt.Engine(slot_bytes=slot, max_pinned_bytes=4 * slot, io_threads=2) as engine:
            # File and memory meet in some of these and miss each other in others.
            for offset in (0, 1, 512, 704):
                state = {
                    key: torch.zeros(len(values) + 8192, dtype=torch.uint8)
                    for key, values in saved.items()
                }
                views = {key: aligned(state[key], offset, len(saved[key])) for key in saved}
                reader = load(views, tmp_path / writer, engine=engine, direct=direct)
                for key, values in saved.items():
                    assert torch.equal(views[key], values), (writer, key, offset)
                    assert state[key].count_nonzero() == values.count_nonzero()
                assert reader.unverified == []
                assert direct == "auto" or not reader.statistics.direct


def aligned(memory: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """Bytes that begin at this offset from a page."""
    begin = -memory.data_ptr() % 4096 + offset
    return memory[begin : begin + count]


@ours_and_stock
def test_more_tensors_than_anything(
    tmp_path: Path, writer: str, tiny_engine: pyckpt.Engine
) -> None:
    saved = {f"t{i}": patterned((i % 50, 3), torch.int32) + i for i in range(700)}
    save(saved, tmp_path, writer)
    state = {key: torch.zeros_like(values) for key, values in saved.items()}
    load(state, tmp_path, engine=tiny_engine)
    for key, values in saved.items():
        assert torch.equal(state[key], values), key


def test_more_files_than_are_opened_at_a_time(tmp_path: Path) -> None:
    saved: dict[str, Any] = {f"t{i}": torch.full((i,), float(i)) for i in range(300)}
    saved["o"] = "object"
    save(saved, tmp_path, "stock-file-a-tensor")
    assert len(list(tmp_path.glob("*.distcp"))) > 300
    state: dict[str, Any] = {f"t{i}": torch.zeros(i) for i in range(300)}
    state["o"] = None
    reader = load(state, tmp_path)
    for i in range(300):
        assert torch.equal(state[f"t{i}"], saved[f"t{i}"])
    assert state["o"] == "object"
    assert reader.unverified == ["o"]


def test_memory_file_system(tiny_engine: pyckpt.Engine) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        saved = {"a": patterned((3 * MIB,), torch.uint8), "b": patterned((33, 7)), "c": None}
        for writer in ("ours", "stock"):
            path = Path(name) / writer
            save(saved, path, writer)
            for engine in (None, tiny_engine):
                state: dict[str, Any] = {key: blank(value) for key, value in saved.items()}
                load(state, path, engine=engine)
                assert_same(state["a"], saved["a"])  # type: ignore[arg-type]
                assert_same(state["b"], saved["b"])  # type: ignore[arg-type]


# --- parts of tensors -----------------------------------------------------------------------------


class Box:
    """A part of a saved tensor, and the tensor that it is to be read into."""

    def __init__(
        self, key: str, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor
    ) -> None:
        self.key = key
        self.offsets = torch.Size(offsets)
        self.lengths = torch.Size(lengths)
        self.target = target

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor


class BoxPlanner(DefaultLoadPlanner):
    """Asks for boxes, of tensors that were saved whole."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__()
        self.boxes = boxes
        self.committed: list[int] = []

    def plan(self) -> LoadPlan:
        items = []
        for i, box in enumerate(self.boxes):
            start = torch.Size([0] * len(box.offsets))
            index = MetadataIndex(box.key, start, 0)
            items.append(
                ReadItem(
                    LoadItemType.TENSOR, MetadataIndex(str(i)), start, index, box.offsets,
                    box.lengths,
                )
            )  # fmt: skip
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.boxes[int(read_item.dest_index.fqn)].target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(int(read_item.dest_index.fqn))


def read_boxes(boxes: Sequence[Box], path: Path, **options: Any) -> pyckpt.DirectReader:
    reader = pyckpt.DirectReader(path, **options)
    planner = BoxPlanner(boxes)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.plan(), planner).wait()
    assert sorted(planner.committed) == list(range(len(boxes)))
    return reader


@st.composite
def boxes_of(
    draw: st.DrawFn, extents: st.SearchStrategy[int], most: int
) -> tuple[torch.Tensor, list[Box]]:
    """A tensor whose memory is in any order, and boxes with destinations of any kind."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        extent = draw(extents)
        shape.append(extent if extent * math.prod(shape) <= most else draw(st.integers(1, 2)))
    order = draw(st.permutations(range(len(shape))))
    saved = patterned(shape, dtype).permute(order)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = [draw(st.integers(0 if n < 8 else 1, n)) for n in saved.shape]
        # Thin boxes, and whole extents, would be rare among all.
        lengths = [
            draw(st.sampled_from([n, n, min(1, n), w]))
            for n, w in zip(saved.shape, lengths, strict=True)
        ]
        offsets = [draw(st.integers(0, n - w)) for n, w in zip(saved.shape, lengths, strict=True)]
        other = draw(st.permutations(range(len(shape))))
        kind = draw(st.sampled_from([dtype, dtype, dtype, torch.complex128]))
        step = draw(st.sampled_from([1, 1, 2]))
        memory = torch.zeros([lengths[d] * step for d in other], dtype=kind)
        target = memory[(slice(None, None, step),) * len(shape)]
        back = [other.index(d) for d in range(len(shape))]
        boxes.append(Box("t", offsets, lengths, target.permute(back)))
    return saved, boxes


def check_boxes(
    case: tuple[torch.Tensor, list[Box]], writer: str, path: Path, **options: Any
) -> None:
    saved, boxes = case
    with tempfile.TemporaryDirectory(dir=path) as name:
        save({"t": saved}, Path(name), writer)
        reader = read_boxes(boxes, Path(name), **options)
    for box in boxes:
        assert_same(box.target, box.of(saved).to(box.target.dtype))
    whole = any(box.target.dtype == saved.dtype and box.lengths == saved.shape for box in boxes)
    if whole and len(boxes) == 1:
        assert reader.unverified == []


@pytest.fixture(scope="module")
def small_engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=2 * 4096, io_threads=2) as engine:
        yield engine


@SETTINGS
@given(case=boxes_of(st.integers(0, 7), 3000), writer=st.sampled_from(["ours", "stock"]))
def test_boxes(tmp_path: Path, small_engine: pyckpt.Engine, case: Any, writer: str) -> None:
    check_boxes(case, writer, tmp_path, engine=small_engine)


@SETTINGS
@given(
    case=boxes_of(st.sampled_from([1, 2, 3, 5, 17_000, 70_001]), 150_000),
    direct=st.sampled_from(["auto", "off"]),
)
def test_boxes_with_wide_gaps(
    tmp_path: Path, small_engine: pyckpt.Engine, case: Any, direct: Any
) -> None:
    """Gaps of more than 64 KiB are not read."""
    check_boxes(case, "ours", tmp_path, engine=small_engine, direct=direct)


def test_wide_gaps_are_not_read(tmp_path: Path) -> None:
    saved = patterned((5, 4, 40_000), torch.int32)
    save({"t": saved, "p": saved.permute(2, 0, 1)}, tmp_path)
    boxes = [
        Box("t", (0, 0, 777), (5, 4, 3), torch.zeros(5, 4, 3, dtype=torch.int32)),
        Box("t", (1, 2, 0), (4, 1, 40_000), torch.zeros(4, 1, 40_000, dtype=torch.int32)),
        Box("p", (777, 0, 0), (3, 5, 4), torch.zeros(3, 5, 4, dtype=torch.int32)),
    ]
    for box in boxes:
        reader = read_boxes([box], tmp_path)
        assert torch.equal(box.target, box.of({"t": saved, "p": saved.permute(2, 0, 1)}[box.key]))
        assert reader.unverified == [box.key]
        statistics = reader.statistics
        assert statistics.bytes_needed == box.target.nbytes
        # Each stretch costs up to two blocks more.
        assert statistics.bytes <= box.target.nbytes + 20 * 2 * 4096


def test_rows_cost_only_themselves(tmp_path: Path) -> None:
    saved = patterned((1000, 5000))
    save({"t": saved}, tmp_path)
    for offset, length in ((0, 125), (125, 125), (875, 125), (333, 334)):
        box = Box("t", (offset, 0), (length, 5000), torch.zeros(length, 5000))
        statistics = read_boxes([box], tmp_path).statistics
        assert_same(box.target, saved[offset : offset + length])
        assert statistics.bytes_needed == box.target.nbytes
        assert statistics.bytes <= box.target.nbytes + 2 * 4096


@pytest.mark.parametrize(
    ("count", "offset"), [(1000, 0), (300_000, 1), (300_000, 0)], ids=["small", "slots", "in place"]
)
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_nothing_is_read_twice(tmp_path: Path, count: int, offset: int, writer: str) -> None:
    """Destinations that want the same bytes, or overlapping ones."""
    saved = patterned((count,))
    save({"t": saved}, tmp_path, writer)
    half = count // 2

    def zeros(length: int) -> torch.Tensor:
        memory = torch.zeros(4 * length + 8192, dtype=torch.uint8)
        return aligned(memory, 4 * offset, 4 * length).view(torch.float32)

    boxes = [
        Box("t", (0,), (count,), zeros(count)),
        Box("t", (0,), (count,), zeros(count)),
        Box("t", (half,), (half,), zeros(half)),
        Box("t", (7,), (half,), torch.zeros(half, dtype=torch.float64)),
    ]
    reader = read_boxes(boxes, tmp_path)
    for box in boxes:
        assert_same(box.target, box.of(saved).to(box.target.dtype))
    head_and_tail = 2 * 8192 if writer == "stock" else 0
    assert reader.statistics.bytes <= saved.nbytes + 2 * 4096 + head_and_tail
    assert reader.unverified == []


def test_tiles_of_a_tensor_verify_it(tmp_path: Path) -> None:
    saved = patterned((10, 300))
    save({"t": saved, "u": saved + 1}, tmp_path)

    def rows(key: str, *bounds: tuple[int, int]) -> list[Box]:
        return [Box(key, (a, 0), (b - a, 300), torch.zeros(b - a, 300)) for a, b in bounds]

    def unverified(*boxes: Box) -> list[str]:
        return read_boxes(boxes, tmp_path).unverified

    assert unverified(*rows("t", (0, 10))) == []
    assert unverified(*rows("t", (4, 10), (0, 4))) == []
    assert unverified(*rows("t", (9, 10), (0, 1), (1, 9), (1, 9))) == []
    assert unverified(*rows("t", (0, 4), (5, 10))) == ["t"]
    assert unverified(*rows("t", (0, 4), (4, 9))) == ["t"]
    assert unverified(*rows("t", (0, 6), (4, 10))) == ["t"]
    assert unverified(*rows("t", (0, 5)), *rows("u", (0, 10))) == ["t"]
    column = Box("t", (0, 0), (10, 299), torch.zeros(10, 299))
    assert unverified(column, *rows("u", (0, 5), (5, 10))) == ["t"]
    # An empty part of a tensor reads nothing of it.
    assert unverified(*rows("t", (3, 3))) == ["t"]


def test_partly_read_items_are_reported(tmp_path: Path) -> None:
    save({"t": patterned((4, 4)), "u": patterned((4,))}, tmp_path)
    state: dict[str, Any] = {"t": torch.zeros(4, 4), "u": torch.zeros(4)}
    assert pyckpt.load(state, tmp_path).not_verified == []
    assert pyckpt.load(state, tmp_path, verify="none").not_verified == ["t", "u"]


# --- items that are not where their metadata says, or not as it says ------------------------------


class Halving(DefaultSavePlanner):
    """Saves in bfloat16, which the metadata does not tell."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.bfloat16() if isinstance(data, torch.Tensor) else data


@ours_and_stock
def test_planner_that_changes_dtypes(tmp_path: Path, writer: str) -> None:
    saved = {"a": torch.arange(50.0), "b": torch.arange(60_000.0).reshape(200, 300).t()}
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path), planner=Halving(), no_dist=True)
    state = {"a": torch.zeros(50), "b": torch.zeros(300, 200)}
    reader = load(state, tmp_path)
    for key, values in saved.items():
        assert torch.equal(state[key], values.bfloat16().float())
    assert reader.unverified == []
    part = Box("b", (10, 3), (280, 100), torch.zeros(280, 100))
    read_boxes([part], tmp_path)
    assert torch.equal(part.target, part.of(saved["b"]).bfloat16().float())


class Reshaping(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.reshape(-1) if isinstance(data, torch.Tensor) else data


@ours_and_stock
def test_planner_that_changes_shapes(tmp_path: Path, writer: str) -> None:
    """Such a checkpoint does not add up; nothing is loaded from it."""
    saved = {"a": torch.arange(6.0).reshape(2, 3)}
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path), planner=Reshaping(), no_dist=True)
    state = {"a": torch.zeros(2, 3)}
    with pytest.raises(pyckpt.errors.CorruptCheckpoint, match=r"a in .*size \(6,\)") as caught:
        pyckpt.load(state, tmp_path)
    assert caught.value.key == "a"
    assert torch.equal(state["a"], torch.zeros(2, 3))


class Inverted(StreamTransformExtension):
    """Stores each byte's complement."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        Inverted.seen.append(version)
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(255 - byte for byte in bytes(data)))
                return len(data)

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def test_stream_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The only one that DCP's readers know unless told otherwise; it needs a package of its own.
    monkeypatch.setattr("torch.distributed.checkpoint._extension.ZStandard", Inverted)
    saved: dict[str, Any] = {"a": patterned((30, 4)), "b": {"c": [1, 2]}, "d": torch.tensor(3)}
    writer = FileSystemWriter(tmp_path, _extensions=[Inverted()])
    dcp.save(saved, storage_writer=writer, no_dist=True)
    state: dict[str, Any] = {"a": torch.zeros(30, 4), "b": {"c": []}, "d": torch.tensor(0)}
    report = pyckpt.load(state, tmp_path)
    assert_same(state["a"], saved["a"])
    assert state["b"] == saved["b"]
    assert state["d"] == 3
    assert sorted(report.not_verified) == ["a", "b.c", "d"]
    assert Inverted.seen


def test_extension_registry(tmp_path: Path) -> None:
    """As stock's reader takes it."""
    saved = {"a": patterned((30, 4)), "b": {"c": [1, 2]}}
    writer = FileSystemWriter(tmp_path, _extensions=[Inverted()])
    dcp.save(saved, storage_writer=writer, no_dist=True)
    registry = ExtensionRegistry()
    registry.register(Inverted)
    for load in (
        lambda state, reader: dcp.load(state, storage_reader=reader, no_dist=True),
        lambda state, reader: pyckpt.load(state, reader=reader),
    ):
        state = {"a": torch.zeros(30, 4), "b": {"c": []}}
        load(state, pyckpt.DirectReader(tmp_path, _extension_registry=registry))
        assert_same(state["a"], saved["a"])
        assert state["b"] == saved["b"]
    with pytest.raises(LoadError, match=r"Unknown extension name='stream\.inverted'"):
        pyckpt.load({"a": torch.zeros(30, 4)}, tmp_path)


def test_load_id(tmp_path: Path) -> None:
    save({"a": patterned((3,))}, tmp_path, "ours")
    reader = pyckpt.DirectReader(tmp_path)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert meta.load_id == reader.load_id
    before = reader.load_id
    reader.reset()
    assert reader.load_id != before


def test_checksums_that_were_not_computed(tmp_path: Path) -> None:
    """torch.save can leave them out; then there is nothing to compare with."""
    torch.serialization.set_crc32_options(False)
    try:
        saved = {"a": patterned((30, 4)), "b": torch.tensor(3)}
        save(saved, tmp_path, "stock")
    finally:
        torch.serialization.set_crc32_options(True)
    state = {"a": torch.zeros(30, 4), "b": torch.tensor(0)}
    report = pyckpt.load(state, tmp_path)
    for key, values in saved.items():
        assert_same(state[key], values)
    assert report.not_verified == ["a", "b"]


# --- readers, engines, paths ----------------------------------------------------------------------


def test_a_reader_is_used_again(tmp_path: Path) -> None:
    reader = pyckpt.DirectReader(tmp_path / "nowhere")
    assert reader.unverified == []
    assert reader.statistics.bytes == 0
    for i in range(3):
        path = tmp_path / str(i)
        save({"t": torch.full((1000,), float(i)), "o": i}, path, ["ours", "stock"][i % 2])
        state = {"t": torch.zeros(1000), "o": -1}
        dcp.load(state, checkpoint_id=path, storage_reader=reader, no_dist=True)
        assert reader.checkpoint_id == path
        assert state["t"].eq(i).all()
        assert state["o"] == i
        assert reader.unverified == ([] if i != 1 else ["o"])
        assert 4000 <= reader.statistics.bytes <= 5 * 4096
    # What the checkpoint holds is read anew at each load.
    save({"t": torch.full((1000,), 9.0)}, path)
    pyckpt.load(state, reader=reader, missing="keep")
    assert state["t"].eq(9).all()
    reader.reset(tmp_path / "1")
    assert reader.statistics.bytes == 0


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify"):
        pyckpt.DirectReader(tmp_path, verify="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direct"):
        pyckpt.DirectReader(tmp_path, direct=True)  # type: ignore[arg-type]
    assert pyckpt.DirectReader.validate_checkpoint_id(tmp_path)
    assert not pyckpt.DirectReader.validate_checkpoint_id(tmp_path / "none")
    assert pyckpt.DirectReader.validate_checkpoint_id("s3://bucket/path")
    assert not pyckpt.DirectReader.validate_checkpoint_id("file://host/path")


def test_missing_directory(tmp_path: Path) -> None:
    state = {"t": torch.zeros(1)}
    with pytest.raises(FileNotFoundError) as caught:
        pyckpt.load(state, tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none" / ".metadata")
    with pytest.raises(FileNotFoundError):
        pyckpt.load(state, tmp_path)


def test_path_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(NotADirectoryError) as caught:
        pyckpt.load({"t": torch.zeros(1)}, path)
    assert caught.value.errno == errno.ENOTDIR


def test_closed_engine(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    engine = pyckpt.Engine()
    state = {"t": torch.zeros(3)}
    pyckpt.load(state, reader=pyckpt.DirectReader(tmp_path, engine=engine))
    engine.close()
    with pytest.raises(EngineClosed):
        pyckpt.load(state, reader=pyckpt.DirectReader(tmp_path, engine=engine))


def test_direct_is_required(tmp_path: Path) -> None:
    """Where the file system can, it happens; what the statistics say is what was done."""
    saved = {"t": patterned((MIB,))}
    save(saved, tmp_path)
    state = {"t": torch.zeros(MIB)}
    reader = load(state, tmp_path, direct="off")
    assert not reader.statistics.direct
    assert reader.statistics.seconds > 0
    if load(state, tmp_path).statistics.direct:
        reader = load(state, tmp_path, direct="require")
        assert reader.statistics.direct
        assert reader.statistics.fallback_reason == ""
        assert_same(state["t"], saved["t"])
    else:
        with pytest.raises(OSError, match="direct"):
            pyckpt.load(state, reader=pyckpt.DirectReader(tmp_path, direct="require"))


# --- several at a time ----------------------------------------------------------------------------


class Stopping(DefaultSavePlanner):
    """Waits, with half of the tensors on their way to disk."""

    def __init__(self) -> None:
        super().__init__()
        self.halfway = threading.Event()
        self.go_on = threading.Event()
        self.count = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.count += 1
        if self.count == 20:
            self.halfway.set()
            assert self.go_on.wait(60)
        return super().resolve_data(write_item)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Start it; what it raises comes in the list."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def states(shift: int = 0) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(50_000.0 + i) + shift for i in range(40)}


def check_load(path: Path, engine: pyckpt.Engine, shift: int = 0) -> None:
    state = {key: torch.zeros_like(values) for key, values in states().items()}
    pyckpt.load(state, reader=pyckpt.DirectReader(path, engine=engine))
    for key, values in states(shift).items():
        assert torch.equal(state[key], values), key


@pytest.mark.parametrize("slots", [2, slow(8)])
def test_load_beside_saves(tmp_path: Path, slots: int) -> None:
    dcp.save(states(), storage_writer=pyckpt.DirectWriter(tmp_path / "old"), no_dist=True)
    with pyckpt.Engine(slot_bytes=65536, max_pinned_bytes=slots * 65536, io_threads=2) as engine:
        writer = pyckpt.DirectWriter(tmp_path / "new", engine=engine)

        def save_some() -> None:
            for shift in range(1, 6):
                dcp.save(states(shift), storage_writer=writer, no_dist=True)

        saving, errors = in_thread(save_some)
        loads = 0
        while saving.is_alive() or not loads:
            check_load(tmp_path / "old", engine)
            loads += 1
        saving.join()
        assert errors == []
        check_load(tmp_path / "new", engine, 5)


def test_load_does_not_wait_for_a_save(tmp_path: Path) -> None:
    """A save that waits for its planner leaves the engine to others."""
    dcp.save(states(), storage_writer=pyckpt.DirectWriter(tmp_path / "old"), no_dist=True)
    planner = Stopping()
    with pyckpt.Engine(slot_bytes=65536, max_pinned_bytes=8 * 65536, io_threads=2) as engine:
        writer = pyckpt.DirectWriter(tmp_path / "new", engine=engine)
        saving, save_errors = in_thread(
            lambda: dcp.save(states(1), storage_writer=writer, planner=planner, no_dist=True)
        )
        assert planner.halfway.wait(60)
        loading, load_errors = in_thread(lambda: check_load(tmp_path / "old", engine))
        loading.join(10)  # only a load that fails this test takes so long
        waited = loading.is_alive()
        planner.go_on.set()
        saving.join()
        loading.join()
        assert save_errors == load_errors == []
        assert not waited
        check_load(tmp_path / "new", engine, 1)


def test_loads_from_several_threads(tmp_path: Path, tiny_engine: pyckpt.Engine) -> None:
    saved = [
        {f"t{i}": patterned((3000 + i,)) + number for i in range(20)} | {"o": number}
        for number in range(3)
    ]
    for number, state in enumerate(saved):
        save(state, tmp_path / str(number), ["ours", "stock"][number % 2])
    barrier = threading.Barrier(3)
    wrong: list[Any] = []

    def run(number: int) -> None:
        try:
            barrier.wait(60)
            for _ in range(5):
                state = {key: blank(value) for key, value in saved[number].items()}
                reader = pyckpt.DirectReader(tmp_path / str(number), engine=tiny_engine)
                pyckpt.load(state, reader=reader, no_dist=True)
                for key, value in saved[number].items():
                    if isinstance(value, torch.Tensor):
                        assert_same(state[key], value)
                assert state["o"] == number
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_mixture(tmp_path: Path) -> None:
    """Many tensors of many kinds, in one load, at random."""
    rng = random.Random(7)
    with pyckpt.Engine(slot_bytes=8192, max_pinned_bytes=5 * 8192, io_threads=3) as engine:
        for number in range(6):
            saved, state = {}, {}
            for i in range(60):
                shape = [rng.choice([1, 2, 3, 17, 64, 301]) for _ in range(rng.randrange(4))]
                dtype, other = rng.choice(DTYPES[:13]), rng.choice(DTYPES[9:13])
                order = rng.sample(range(len(shape)), len(shape))
                values = torch.arange(math.prod(shape)).remainder(100).reshape(shape).to(dtype)
                saved[f"t{i}"] = values.permute(order)
                same = rng.random() < 0.6
                target = torch.zeros(saved[f"t{i}"].shape, dtype=dtype if same else other)
                state[f"t{i}"] = (
                    target.permute(order)
                    .contiguous()
                    .permute([order.index(d) for d in range(len(shape))])
                )
            writer = rng.choice(list(WRITERS))
            save(saved, tmp_path / str(number), writer)
            load(state, tmp_path / str(number), engine=engine)
            for key, values in saved.items():
                assert_same(state[key], values.to(state[key].dtype))


def test_two_keys_of_one_memory(tmp_path: Path) -> None:
    """Tied weights that were saved untied: the later one stays, whole, not a mixture."""
    state = {"a": torch.full((700_000,), 1.0), "b": torch.full((700_000,), 2.0)}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(tmp_path))
    for _ in range(10):
        tied = torch.zeros(700_000)
        pyckpt.load({"a": tied, "b": tied}, tmp_path)
        assert torch.equal(tied, state["b"])
        overlapping = torch.zeros(1_000_000)
        pyckpt.load({"a": overlapping[:700_000], "b": overlapping[300_000:]}, tmp_path)
        assert torch.equal(overlapping[300_000:], state["b"])
        assert torch.equal(overlapping[:300_000], state["a"][:300_000])


@pytest.mark.parametrize("way", ["stock", "plain", "items", "converted"])
def test_autograd_sees_that_a_load_changes_tensors(tmp_path: Path, way: str) -> None:
    """It would compute gradients of the values from before with those that were loaded."""
    save({"w": torch.full((1000,), 3.0)}, tmp_path)
    w = torch.nn.Parameter(torch.ones(1000, dtype=torch.half if way == "converted" else None))
    y = (w * w).sum()
    if way == "plain":
        pyckpt.load({"w": w}, tmp_path)
    else:
        planner = None if way == "stock" else pyckpt.LoadPlanner()
        reader = pyckpt.DirectReader(tmp_path)
        dcp.load({"w": w}, storage_reader=reader, planner=planner, no_dist=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    (w * w).sum().backward()
    assert w.grad is not None
    assert w.grad[0] == 6


@pytest.mark.parametrize("load", [load, lambda *given: pyckpt.load(*given)], ids=["dcp", "pyckpt"])
def test_autograd_sees_what_a_failed_load_changes(tmp_path: Path, load: Any) -> None:
    save({"v": torch.full((1000,), 3.0)}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((1000,), 3.0).numpy().tobytes()) + 4] ^= 1
    file.write_bytes(data)
    v = torch.nn.Parameter(torch.ones(1000))
    before = v._version
    with pytest.raises((CheckpointException, pyckpt.errors.CorruptCheckpoint)):
        load({"v": v}, tmp_path)
    assert v[0] == 3
    assert v._version > before


def test_tensors_that_count_no_changes(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    with torch.inference_mode():
        w = torch.zeros(3)
    load({"w": w}, tmp_path)
    pyckpt.load({"w": w}, tmp_path)
    assert w.tolist() == [1, 1, 1]


def own_memory(count: int, apart: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that overlap in memory of the program's own, in what torch takes for two
    storages."""
    memory = bytearray(4 * (count + apart))
    a = torch.frombuffer(memory, dtype=torch.float32, count=count)
    b = torch.frombuffer(memory, dtype=torch.float32, offset=4 * apart)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    return a, b


def test_two_keys_of_one_memory_in_two_storages(tmp_path: Path) -> None:
    count = 1 << 19
    saved = {"a": torch.full((count,), 1.0), "b": torch.full((count,), 2.0)}
    save(saved, tmp_path)
    a, b = own_memory(count, 16)
    reader = load({"a": a, "b": b}, tmp_path)
    assert len(reader._loads[0].jobs) == 2, "both were under way at once"
    assert torch.equal(b, saved["b"])
    assert torch.equal(a[:16], saved["a"][:16])


class CountedJob:
    """Notes which tensors it would read."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add_tensors(self, files: Any, offsets: Any, tensors: list[torch.Tensor]) -> list[int]:
        self.tensors += tensors
        return [-1] * len(tensors)

    def run(self) -> list[int]:
        return []


class CountedFolder:
    def job(self, *, checksum: bool) -> CountedJob:
        return CountedJob()

    def add(self, job: CountedJob, name: str) -> int:
        return 0


def test_two_keys_of_one_memory_beside_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job ends where it has too many files, between noting a destination and reading it."""
    monkeypatch.setattr(filling, "FILES_MAX", 2)
    reads = filling.FileReads(CountedFolder(), checksum=False)  # type: ignore[arg-type]
    a, b = own_memory(100, 16)
    targets = {"x": torch.zeros(100), "y": torch.zeros(100), "a": a, "b": b}
    payload = Payload(0, 400, torch.float32, (100,), (1,), None)
    for key, target in targets.items():
        info = StorageInfo(f"file of {key}", 0, 400)
        item: Any = SimpleNamespace(dest_index=MetadataIndex(key), storage_offsets=(0,))
        reads.add_tensor(item, Check(key, info, payload, []), target)
    reads.flush()
    assert [len(job.tensors) for job in reads.jobs] == [2, 1, 1]  # type: ignore[attr-defined]


def test_files_are_closed_when_the_load_is_over(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1000)}, storage_writer=pyckpt.DirectWriter(tmp_path))
    reader = pyckpt.DirectReader(tmp_path)
    dcp.load({"a": torch.zeros(1000)}, storage_reader=reader)
    held = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)
    ]
    assert not [path for path in held if path.startswith(str(tmp_path))]
    assert reader.statistics.bytes > 0  # what is known of them is still there
    assert reader.statistics.direct == (reader.statistics.fallback_reason == "")


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_a_tensor_whose_memory_was_freed(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1000)}, storage_writer=pyckpt.DirectWriter(tmp_path))
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(pyckpt.errors.LoadError, match="freed"):
        pyckpt.load({"a": freed}, tmp_path)
    with pytest.raises(CheckpointException, match="freed"):
        dcp.save({"a": freed}, storage_writer=pyckpt.DirectWriter(tmp_path / "other"))
