"""DirectWriter in one process: what it writes is what stock writes, and stock reads it."""

from __future__ import annotations

import io
import os
import pickle
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt

PAGE = 4096
SLOT = 4 * PAGE

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.fixture(scope="module")
def small_engine() -> Any:
    """An engine whose slots are so small that everything spans several."""
    with pyckpt.Engine(slot_bytes=SLOT, max_pinned_bytes=3 * SLOT, io_threads=3) as engine:
        yield engine


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of any bit pattern that the dtype has."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    return random_bytes(count * dtype.itemsize).view(dtype).reshape(shape)


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    """The bytes of an item as stock's FileSystemWriter makes them."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        tensor = torch.empty(
            tensor.shape, dtype=tensor.dtype
        )  # the strides of nothing are anyone's choice
    elif tensor.layout is torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def read_items(directory: Path) -> dict[str, tuple[Any, bytes]]:
    """What the metadata tells of each item, and its bytes."""
    with open(directory / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    items = {}
    for index, info in metadata.storage_data.items():
        with open(directory / info.relative_path, "rb") as file:
            file.seek(info.offset)
            items[index.fqn] = (info, file.read(info.length))
    return items


def save(state: dict[str, Any], directory: Path, **options: Any) -> pyckpt.DirectWriter:
    writer = pyckpt.DirectWriter(directory, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def check(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Every item is what torch.save writes, its checksums are right, and stock loads it."""
    items = read_items(directory)
    assert items.keys() == state.keys()
    for key, tensor in state.items():
        info, data = items[key]
        assert data == saved_by_torch(tensor), key
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
        payload = data[info.payload_offset : info.payload_offset + info.payload_length]
        assert info.crc32 == pyckpt._C.crc32(payload)
        assert len(payload) < 65536 or (info.offset + info.payload_offset) % PAGE == 0
    loaded = {
        key: torch.full_like(tensor, 0, memory_format=torch.contiguous_format)
        if tensor.dtype.itemsize
        else tensor
        for key, tensor in state.items()
    }
    dcp.load(loaded, checkpoint_id=directory)
    for key, tensor in state.items():
        assert same_bits(loaded[key], tensor), key


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that knows no NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "matrix": random_tensor((33, 7), dtype),
        "scalar": random_tensor((), dtype),
        "empty": random_tensor((0, 3), dtype),
    }
    save(state, tmp_path)
    items = read_items(tmp_path)
    for key, tensor in state.items():
        assert items[key][1] == saved_by_torch(tensor)
    loaded = {key: random_tensor(tuple(tensor.shape), dtype) for key, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for key, tensor in state.items():
        assert same_bits(loaded[key], tensor)


def test_sizes_that_hurt(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    sizes = [0, 1, PAGE - 1, PAGE, PAGE + 1, SLOT - 1, SLOT, SLOT + 1, 65535, 65536, 65537]
    sizes += [99991, 3 * SLOT, 1 << 20, (1 << 20) + 1]
    state = {f"{size}": random_bytes(size) for size in sizes}
    save(state, tmp_path, engine=small_engine)
    check(state, tmp_path)


def test_more_tensors_than_slots(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    state = {f"{i:04}": random_bytes(i * 37 % 5000) for i in range(400)}
    writer = save(state, tmp_path, engine=small_engine)
    check(state, tmp_path)
    assert writer.statistics is not None
    assert writer.statistics.items == 400
    [name] = [path.name for path in tmp_path.iterdir() if path.name != ".metadata"]
    assert writer.statistics.bytes == (tmp_path / name).stat().st_size


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_tensor_is_written_as_torch_writes_it(tmp_path: Path, data: st.DataObject) -> None:
    """Random dtypes, shapes, strides, offsets into larger storages, slot sizes, thread counts."""
    state = {}
    for i in range(data.draw(st.integers(1, 6))):
        dtype = data.draw(st.sampled_from(DTYPES))
        base = data.draw(st.lists(st.integers(0, 40), min_size=0, max_size=4))
        tensor = random_tensor(tuple(base), dtype)
        for d, size in enumerate(base):
            start = data.draw(st.integers(0, size))
            step = data.draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * d + (slice(start, None, step),)]
        order = data.draw(st.permutations(range(len(base))))
        state[f"t{i}"] = tensor.permute(order)
    slot = data.draw(st.sampled_from([PAGE, 2 * PAGE, 16 * PAGE]))
    threads = data.draw(st.integers(1, 3))
    directory = tmp_path / os.urandom(8).hex()
    with pyckpt.Engine(slot_bytes=slot, max_pinned_bytes=4 * slot, io_threads=threads) as engine:
        save(state, directory, engine=engine)
    items = read_items(directory)
    for key, tensor in state.items():
        assert items[key][1] == saved_by_torch(tensor)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_memory_layouts(tmp_path: Path, direct: str) -> None:
    base = torch.rand(64, 3, 33, 20)
    state = {
        "view": base[3:9, 1],
        "columns": base.view(64, -1)[:, ::7],
        "transposed": base.permute(3, 1, 0, 2),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "expanded": torch.rand(5, 1).expand(5, 300_000),
        "parameter": torch.nn.Parameter(torch.rand(11)),
        "long": torch.rand(1_500_000),
    }
    save(state, tmp_path, direct=direct)
    check(state, tmp_path)
    strides = {
        key: getattr(info, "payload_stride", None)
        for key, (info, _) in read_items(tmp_path).items()
    }
    assert strides["transposed"] == (1, 660, 1980, 20)
    assert strides["channels_last"] == (1980, 1, 60, 3)
    assert [key for key, stride in strides.items() if stride] == ["transposed", "channels_last"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_is_more_than_memory(tmp_path: Path) -> None:
    """Sparse, conjugated and subclassed tensors, and objects, are written as torch.save does."""

    class Tagged(torch.Tensor):
        pass

    state = {
        "sparse": torch.eye(4).to_sparse(),
        "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        "tagged": torch.rand(3).as_subclass(Tagged),
        "object": [1, "two", {"three": 3.0}],
    }
    torch.serialization.add_safe_globals([])
    planned: dict[str, bytes] = {}

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            if isinstance(data, io.BytesIO):
                planned[write_item.index.fqn] = data.getvalue()
            return data

    dcp.save(
        {key: value for key, value in state.items() if key != "tagged"},
        storage_writer=pyckpt.DirectWriter(tmp_path),
        planner=Planner(),
    )
    items = read_items(tmp_path)
    assert items["conjugate"][1] == saved_by_torch(state["conjugate"])  # type: ignore[arg-type]
    assert items["sparse"][1][:2] == b"PK"
    assert torch.equal(
        torch.load(io.BytesIO(items["sparse"][1]), weights_only=True).to_dense(), torch.eye(4)
    )
    for key, data in planned.items():
        info, stored = items[key]
        assert stored == data
        assert (info.payload_offset, info.payload_length) == (0, len(data))
        assert info.crc32 == pyckpt._C.crc32(data)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.qint8)
    save({"q": tensor}, tmp_path)
    stored = torch.load(io.BytesIO(read_items(tmp_path)["q"][1]), weights_only=True)
    assert torch.equal(stored.int_repr(), tensor.int_repr())
    assert stored.q_scale() == tensor.q_scale()


def test_literal_bytes(tmp_path: Path) -> None:
    """A small image, byte for byte, as docs/format.md describes it."""
    state = {"a": torch.arange(3, dtype=torch.uint8), "b": random_bytes(65536)}
    save(state, tmp_path)
    items = read_items(tmp_path)
    a, b = saved_by_torch(state["a"]), saved_by_torch(state["b"])
    prefix = items["b"][0].payload_offset
    at = -(-(len(a) + prefix) // PAGE) * PAGE - prefix
    [path] = tmp_path.glob("*.distcp")
    assert path.read_bytes() == a + bytes(at - len(a)) + b
    assert vars(items["b"][0]) == {
        "relative_path": path.name,
        "offset": at,
        "length": len(b),
        "crc32": pyckpt._C.crc32(state["b"].numpy()),
        "payload_offset": prefix,
        "payload_length": 65536,
    }


@pytest.mark.slow
def test_large_item_matches_torch() -> None:
    """From 4 GiB on zip needs other fields. The envelope is compared, no tensor is written."""
    from pyckpt.format.envelope import envelope_of

    class Sink:
        """A file that keeps what is short, which a tensor's memory is not."""

        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def write(self, data: Any) -> int:
            self.parts.append(bytes(data) if len(data) < 1 << 20 else b"")
            return len(data)

        def flush(self) -> None:
            pass

    size = (1 << 32) + 5
    sink = Sink()
    tensor = torch.zeros(size, dtype=torch.uint8)  # never touched, so it takes no memory
    torch.save(tensor, sink)
    layout = envelope_of(torch.uint8, (size,), (1,))
    assert layout is not None
    crc = 0
    zeros = bytes(1 << 20)
    for _ in range(size >> 20):
        crc = pyckpt._C.crc32(zeros, crc)
    crc = pyckpt._C.crc32(bytes(size % (1 << 20)), crc)
    assert b"".join(sink.parts) == layout.envelope.prefix + layout.envelope.suffix(crc)


def test_async_save(tmp_path: Path) -> None:
    state = {"w": torch.rand(100_000), "step": torch.tensor(3.0)}
    future = dcp.async_save(state, storage_writer=pyckpt.DirectWriter(tmp_path))
    future.result()
    check(state, tmp_path)


def test_a_save_that_fails_before_it_is_staged_is_over(tmp_path: Path) -> None:
    """Torch 2.9 says where to write before it has the state copied."""
    writer = pyckpt.DirectWriter(tmp_path)
    with pytest.raises(ValueError, match="address"):
        writer.reset("other://bucket/step-1")
    assert writer.staged.cancelled()
    assert writer.written.cancelled()
    state = {"w": torch.rand(100)}
    dcp.async_save(state, storage_writer=writer).result()
    assert writer.written.result(60) is None
    check(state, tmp_path)


def test_background_process(tmp_path: Path) -> None:
    """A writer crosses to another process as its settings."""
    with pyckpt.Engine(slot_bytes=SLOT, max_pinned_bytes=SLOT, io_threads=1) as engine:
        writer = pyckpt.DirectWriter(tmp_path, overwrite=False, direct="off", engine=engine)
        dcp.save({"a": torch.ones(3)}, storage_writer=writer)
        copy = pickle.loads(pickle.dumps(writer))
    assert copy.path == tmp_path
    assert (copy.overwrite, copy.sync_files, copy.direct) == (False, True, "off")
    copy.reset(tmp_path / "other")
    dcp.save({"a": torch.ones(3)}, storage_writer=copy)
    assert (tmp_path / "other" / ".metadata").exists()


def test_checkpoint_id_instead_of_a_path(tmp_path: Path) -> None:
    writer = pyckpt.DirectWriter()
    for name in ("one", "two"):
        dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / name, storage_writer=writer)
        assert (tmp_path / name / ".metadata").exists()
    with pytest.raises(ValueError, match="needs a path"):
        _ = pyckpt.DirectWriter().path


def test_saves_follow_one_another(tmp_path: Path) -> None:
    writer = pyckpt.DirectWriter(tmp_path)
    for step in range(3):
        state = {"a": torch.full((1000,), float(step))}
        dcp.save(state, storage_writer=writer)
        assert len(list(tmp_path.iterdir())) == 2  # the metadata, and the file it names
        check(state, tmp_path)


def test_overwrites_what_stock_wrote(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    save({"a": torch.ones(3)}, tmp_path)
    check({"a": torch.ones(3)}, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if not name.startswith("__0_")] == [".metadata", "notes.txt"]
    assert len(names) == 3


def test_no_overwrite(tmp_path: Path) -> None:
    save({"a": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException) as info:
        save({"a": torch.ones(3)}, tmp_path, overwrite=False)
    assert isinstance(info.value.failures[0][0], FileExistsError)
    check({"a": torch.zeros(3)}, tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no address of an object store"):
        pyckpt.DirectWriter("other://bucket/checkpoint")
    with pytest.raises(ValueError, match="direct"):
        pyckpt.DirectWriter(tmp_path, direct="maybe")  # type: ignore[arg-type]
    assert pyckpt.DirectWriter.validate_checkpoint_id("s3://bucket/checkpoint")
    assert pyckpt.DirectWriter.validate_checkpoint_id(tmp_path / "new")
    assert not pyckpt.DirectWriter.validate_checkpoint_id("file://host/checkpoint")


def test_is_its_own_stager(tmp_path: Path) -> None:
    """DCP takes a writer with a stager's attributes for one."""
    from torch.distributed.checkpoint.staging import AsyncStager

    assert isinstance(pyckpt.DirectWriter(tmp_path), AsyncStager)


def test_a_planner_that_makes_tensors(tmp_path: Path) -> None:
    """What a planner computes on the way out is resolved late, and let go of early."""
    alive: set[int] = set()
    most = 0
    lock = threading.Lock()

    class Token:
        def __init__(self, number: int) -> None:
            self.number = number
            with lock:
                alive.add(number)

        def __del__(self) -> None:
            with lock:
                alive.discard(self.number)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            nonlocal most
            data = super().resolve_data(write_item)
            assert isinstance(data, torch.Tensor)
            made = bytearray((data * 2).numpy().tobytes())
            token = Token(len(alive) + 1000 * most)
            tensor = torch.frombuffer(Owned(made, token), dtype=data.dtype)
            most = max(most, len(alive))
            return tensor

    class Owned(bytearray):
        def __new__(cls, data: bytearray, token: Token) -> Owned:
            return super().__new__(cls, data)

        def __init__(self, data: bytearray, token: Token) -> None:
            super().__init__(data)
            self.token = token

    state = {f"{i:03}": torch.full((SLOT // 4,), float(i)) for i in range(200)}
    with pyckpt.Engine(slot_bytes=SLOT, max_pinned_bytes=4 * SLOT, io_threads=2) as engine:
        dcp.save(
            state, storage_writer=pyckpt.DirectWriter(tmp_path, engine=engine), planner=Planner()
        )
    check({key: tensor * 2 for key, tensor in state.items()}, tmp_path)
    # A ring of two slots, four rings queued, and what is being handed over: far from all 200.
    assert 0 < most <= 20


def test_concurrent_saves_share_an_engine(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    states = [{f"t{i}": random_bytes(50_000 + i) for i in range(40)} for _ in range(4)]
    barrier = threading.Barrier(len(states))
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            barrier.wait()
            save(states[number], tmp_path / str(number), engine=small_engine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, state in enumerate(states):
        check(state, tmp_path / str(number))


def test_saves_into_one_directory_at_once(tmp_path: Path) -> None:
    """Whichever commits last is there, whole; the others leave nothing."""
    states = [{"t": torch.full((30_000,), float(i))} for i in range(4)]
    threads = [threading.Thread(target=save, args=(state, tmp_path)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = {"t": torch.zeros(30_000)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert any(torch.equal(loaded["t"], state["t"]) for state in states)
    save(states[0], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_statistics(tmp_path: Path) -> None:
    writer = pyckpt.DirectWriter(tmp_path)
    assert writer.statistics is None
    dcp.save({"a": torch.rand(1_000_000)}, storage_writer=writer)
    statistics = writer.statistics
    assert statistics is not None
    assert (
        statistics.bytes
        == statistics.bytes_written
        == os.path.getsize(next(tmp_path.glob("*.distcp")))
    )
    assert statistics.direct == (statistics.fallback_reason == "")
    assert min(statistics.seconds, statistics.copy_seconds, statistics.write_seconds) > 0
    assert "1 items, 0.004 GB" in str(statistics)


def test_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = pyckpt.DirectWriter("here")
    monkeypatch.chdir("/")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert (tmp_path / "here" / ".metadata").exists()


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """The bytes around a tensor are made once a dtype, whatever the defaults are at that moment."""
    from pyckpt.format import envelope

    envelope._checked_template.cache_clear()
    envelope.envelope_of.cache_clear()
    state = {"a": torch.rand(1000)}
    with torch.device("meta"):
        save(state, tmp_path)
    assert read_items(tmp_path)["a"][0].payload_offset > 0
    check(state, tmp_path)


def test_what_failed_saves_left_is_removed_before_the_next_writes(tmp_path: Path) -> None:
    """So that it does not keep a full disk full."""
    save({"a": torch.zeros(10)}, tmp_path)
    [kept] = tmp_path.glob("*.distcp")
    remains = [tmp_path / f"__{rank}_{'0' * 32}.distcp" for rank in (0, 3)]
    for path in remains:
        path.write_bytes(b"remains")
    seen: list[set[str]] = []

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            seen.append({path.name for path in tmp_path.glob("*.distcp")})
            return super().resolve_data(write_item)

    writer = pyckpt.DirectWriter(tmp_path)
    dcp.save({"a": torch.ones(10)}, storage_writer=writer, planner=Planner())
    assert kept.name in seen[0]
    assert len(seen[0]) == 2  # that, and the one being written
    assert not any(path.exists() for path in remains)


def test_save_id(tmp_path: Path) -> None:
    writer = pyckpt.DirectWriter(tmp_path)
    ids = set()
    for _ in range(2):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer)
        ids.add(writer.save_id)
        with open(tmp_path / ".metadata", "rb") as file:
            assert pickle.load(file).storage_meta.save_id == writer.save_id
        [data] = tmp_path.glob("*.distcp")
        assert writer.save_id in data.name
    assert len(ids) == 2
