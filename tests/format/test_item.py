"""The Locator: where a tensor's bytes are in what torch.save wrote, and when not to say."""

from __future__ import annotations

import io
import math
import random
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _sampling import slow

from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator, Payload, has_its_checksums

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.int", "torch.uint", "torch.q"))
    }
    | {torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64},
    key=str,
)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def locate(data: bytes, locator: Locator | None = None) -> Payload | None:
    return (locator or Locator()).locate(data[:HEAD_BYTES], data[-TAIL_BYTES:], len(data))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor, in the order of its memory."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    flat = tensor.detach().permute(order).contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if tensor.numel() else b""


def check(tensor: torch.Tensor) -> None:
    data = saved(tensor)
    found = locate(data)
    assert found is not None
    raw = bits(tensor)
    assert data[found.offset : found.offset + found.length] == raw
    assert found.length == len(raw)
    assert (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
    assert found.stride == tensor.stride()
    assert found.crc32 == zlib.crc32(raw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    raw = torch.arange(10 * dtype.itemsize, dtype=torch.uint8)
    check(raw.view(dtype) if dtype != torch.bool else raw % 2 == 0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.arange(1000.0),
        torch.arange(40_000.0),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(4.0).reshape(1, 4, 1),
        torch.arange(4.0).as_strided((1, 4), (77, 1)),
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).detach(),
        torch.arange(3.0).requires_grad_(),
        torch.ones((2,) * 25)[(0,) * 13].clone(),
    ],
    ids=lambda tensor: "x".join(map(str, tensor.shape)) or "0-d",
)
def test_layouts(tensor: torch.Tensor) -> None:
    check(tensor)


def rewritten(data: bytes, change: Any, method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with other contents, by a writer other than torch's."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", method) as new:
        for name in old.namelist():
            for to, content in change(name, old.read(name)).items():
                new.writestr(to, content)
    return file.getvalue()


def big_endian(name: str, content: bytes) -> dict[str, bytes]:
    return {name: b"big" if name.endswith("byteorder") else content}


def second_storage(name: str, content: bytes) -> dict[str, bytes]:
    extra = {"archive/data/1": b"1234"} if name.endswith("data/0") else {}
    return {name: content, **extra}


def other_pickle(pickled: bytes) -> Any:
    return lambda name, content: {name: pickled if name.endswith(".pkl") else content}


def not_plain() -> Iterator[Any]:
    base = torch.arange(12.0)
    yield pytest.param(saved(base[3:6]), id="view")
    yield pytest.param(saved(base[:6]), id="view-from-the-first")
    yield pytest.param(saved(base.reshape(3, 4)[:, ::2]), id="strided-view")
    yield pytest.param(saved(base.as_strided((3, 4), (1, 3))[:2]), id="rows-of-a-transposed")
    yield pytest.param(saved(torch.zeros(1).expand(4)), id="expanded")
    yield pytest.param(saved(base.as_strided((3, 4), (1, 1))), id="overlapping")
    yield pytest.param(saved(torch.ones(3, dtype=torch.complex64).conj()), id="conjugated")
    yield pytest.param(saved(torch.ones(3, dtype=torch.complex64).conj().imag), id="negated")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each that they will go
        quantised = torch.quantize_per_tensor(base, 0.1, 0, torch.qint8)
    yield pytest.param(saved(quantised), id="quantised")
    yield pytest.param(saved(torch.eye(3).to_sparse()), id="sparse")
    yield pytest.param(saved(torch.empty(3, device="meta")), id="meta")
    yield pytest.param(saved([base]), id="list")
    yield pytest.param(saved((base, base.clone())), id="two-tensors")
    yield pytest.param(saved(torch.nn.Parameter(base)), id="parameter")
    yield pytest.param(saved(base.untyped_storage()), id="storage")
    yield pytest.param(saved({"a": 1}), id="object")
    yield pytest.param(saved(torch.nn.Linear(2, 2)), id="module")
    yield pytest.param(saved(base, _use_new_zipfile_serialization=False), id="legacy")
    yield pytest.param(rewritten(saved(base), big_endian), id="big-endian")
    yield pytest.param(rewritten(saved(base), second_storage), id="two-storages")
    yield pytest.param(
        rewritten(saved(base), lambda n, c: {n: c}, zipfile.ZIP_DEFLATED), id="compressed"
    )
    yield pytest.param(rewritten(saved(base), other_pickle(b"\x80\x02I1\n0.")), id="pickle-of-none")
    yield pytest.param(rewritten(saved(base), other_pickle(b"garbage")), id="no-pickle")
    yield pytest.param(
        rewritten(saved(base), other_pickle(b"cbuiltins\neval\n(S'1'\ntR.")), id="eval"
    )
    yield pytest.param(b"", id="nothing")
    yield pytest.param(b"PK\3\4", id="four-bytes")
    yield pytest.param(b"\0" * 5000, id="zeros")


@pytest.mark.parametrize("data", list(not_plain()))
def test_what_is_no_plain_tensor(data: bytes) -> None:
    assert locate(data) is None


def test_pickles_run_nothing(tmp_path: Any) -> None:
    witness = tmp_path / "witness"
    evil = b"cbuiltins\nopen\n(S'" + str(witness).encode() + b"'\nS'w'\ntR."
    assert locate(rewritten(saved(torch.ones(3)), other_pickle(evil))) is None
    assert not witness.exists()


def test_checksums_of_tensors_alike() -> None:
    locator = Locator()
    for i in range(5):
        tensor = torch.full((20, 3), float(i))
        found = locate(saved(tensor), locator)
        assert found is not None
        assert found.crc32 == zlib.crc32(bits(tensor))


def test_tensors_not_alike_in_items_of_one_length() -> None:
    tensors = [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6, dtype=torch.int32).reshape(2, 3).view(torch.float32),
        torch.arange(6).to(torch.uint32).reshape(3, 2),
        torch.arange(6, dtype=torch.int32).reshape(3, 2),
    ]
    items = [saved(tensor) for tensor in tensors]
    assert len({len(item) for item in items}) == 1  # or this tests nothing
    locator = Locator()
    for i in [*range(6), *range(6), 3, 3, 0, 5, 1]:
        found = locate(items[i], locator)
        assert found is not None
        assert (found.dtype, found.shape, found.stride) == (
            tensors[i].dtype,
            tuple(tensors[i].shape),
            tensors[i].stride(),
        )


def test_an_unknown_item_is_forgotten() -> None:
    """That one item could not be read tells nothing of the next."""
    locator = Locator()
    good = saved(torch.arange(6.0))
    bad = bytearray(good)
    bad[good.index(b"_rebuild")] ^= 1
    assert locate(bytes(bad), locator) is None
    assert locate(good, locator) is not None
    assert locate(bytes(bad), locator) is None


def test_without_checksums() -> None:
    """torch.save can be told to write none; a number that is none must not be compared with."""
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(6.0))
    finally:
        torch.serialization.set_crc32_options(True)
    found = locate(data)
    assert found is None or found.crc32 is None


@pytest.mark.slow
def test_every_flipped_bit() -> None:
    """What is found in a damaged item is what was there, or nothing, or has another checksum."""
    data = bytearray(saved(torch.arange(1500).reshape(2, 750).t()))
    right = locate(bytes(data))
    assert right is not None
    for warm in (False, True):
        locator = Locator()
        if warm:
            locate(bytes(data), locator)
        ends = [*range(min(HEAD_BYTES, len(data))), *range(max(0, len(data) - 1200), len(data))]
        for at in dict.fromkeys(ends):
            for bit in range(8):
                data[at] ^= 1 << bit
                found = locate(bytes(data), locator if warm else None)
                data[at] ^= 1 << bit
                if found is not None:
                    assert found._replace(crc32=None) == right._replace(crc32=None), (at, bit)


def test_torn_items() -> None:
    data = saved(torch.arange(300.0))
    for end in range(len(data)):
        assert locate(data[:end]) is None
    for begin in range(1, len(data), 7):
        assert locate(data[begin:]) is None


def test_random_bytes() -> None:
    rng = random.Random(1)
    data = saved(torch.arange(300.0))
    right = locate(data)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            at = rng.choice([rng.randrange(700), len(data) - 1 - rng.randrange(900)])
            damaged[at] = rng.randrange(256)
        found = locate(bytes(damaged))
        assert found is None or found._replace(crc32=right.crc32) == right  # type: ignore[union-attr]


def test_large_tensor() -> None:
    """Over 4 GiB the archive is a zip64; only its ends are looked at."""
    from pyckpt.format.envelope import envelope_of

    shape = (3, 1 << 31)
    layout = envelope_of(torch.int8, torch.Size(shape), (1 << 31, 1))
    assert layout is not None
    envelope = layout.envelope
    length = len(envelope.prefix) + math.prod(shape) + len(envelope.suffix(0))
    tail = (b"\0" * TAIL_BYTES + envelope.suffix(0x12345678))[-TAIL_BYTES:]
    head = (envelope.prefix + b"\0" * HEAD_BYTES)[:HEAD_BYTES]
    found = Locator().locate(head, tail, length)
    assert found == Payload(
        len(envelope.prefix), math.prod(shape), torch.int8, shape, (1 << 31, 1), 0x12345678
    )


@pytest.mark.parametrize("every", [7, slow(1)])
def test_soundness(every: int) -> None:
    """Of a whole item: what torch.load would take for another tensor, or for none, is not sound."""
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    data = bytearray(saved(tensor))
    assert has_its_checksums(data) is True
    harmless = 0
    for number in range(0, 8 * len(data), every):
        at, bit = divmod(number, 8)
        data[at] ^= 1 << bit
        if has_its_checksums(data):
            try:
                loaded = torch.load(io.BytesIO(data))
            except Exception:  # which is an error all right
                pass
            else:
                harmless += 1
                assert torch.equal(loaded, tensor), (at, bit)
        data[at] ^= 1 << bit
    assert harmless
    assert has_its_checksums(b"") is None
    assert has_its_checksums(b"PK") is None
    assert has_its_checksums(b"PK\3\4") is False
    assert has_its_checksums(saved(tensor, _use_new_zipfile_serialization=False)) is None
