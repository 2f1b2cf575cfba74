"""Plain values: the bytes of torch.save, and what reads them back."""

from __future__ import annotations

import collections
import io
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.utils.serialization import config

import pyckpt
from pyckpt.dcp import objects
from pyckpt.format import plain


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


SHARED = ["shared"]
PLAIN = [
    *(0, 1, -1, 255, 256, 65_536, 2**31, 2**63, -(2**100), True, False, None),
    *(0.0, -0.0, 1.5, math.inf, math.nan, "", "abc", "ü" * 300, "\ud800", "x" * 70_000),
    *((), [], {}, (1, (2,)), [1, [2, "x"]], {"a": {1: None}}, {(1, 2): [3]}),
    *([SHARED, SHARED], list(range(3000)), {i: [i] for i in range(2000)}),
]  # fmt: skip
OTHER = [
    *(1j, b"bytes", bytearray(b"x"), {1}, frozenset(), int, print, torch.float32, torch.Size([1])),
    *(torch.zeros(2), [torch.zeros(2)], collections.OrderedDict(a=1), [[[{1: b"x"}]]]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:20])
def test_same_bytes_as_torch_save(value: Any) -> None:
    item = plain.encode(value)
    assert item == saved(value)
    for read in (item, memoryview(item)):
        back = plain.decode(read)
        assert type(back) is type(value)
        assert repr(back) == repr(value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda sub: st.lists(sub) | st.tuples(sub, sub) | st.dictionaries(st.text(), sub),
)


@settings(max_examples=examples(100))
@given(values)
def test_same_bytes_as_torch_save_at_random(value: Any) -> None:
    assert plain.encode(value) == saved(value)
    assert repr(plain.decode(plain.encode(value))) == repr(value)


def test_shared_values_stay_shared() -> None:
    one, other = plain.decode(plain.encode([SHARED, SHARED]))
    assert one is other


@pytest.mark.parametrize("value", OTHER, ids=lambda value: repr(value)[:20])
def test_others_are_for_torch(value: Any) -> None:
    with pytest.raises(plain.NotPlain):
        plain.encode(value)
    with pytest.raises(plain.NotPlain):
        plain.decode(saved(value))


def test_large_ones_are_for_torch() -> None:
    with pytest.raises(plain.NotPlain):
        plain.encode("x" * (1 << 20))
    with pytest.raises(plain.NotPlain):
        plain.decode(saved("x" * (1 << 20)))


def test_cycles_are_for_pickle() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert plain.encode(cycle) == saved(cycle)
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        plain.encode(deep)


@pytest.mark.parametrize("value", [7, "some text", [1, {"a": 2.5}]])
def test_every_byte_is_looked_at(value: Any) -> None:
    item = bytearray(plain.encode(value))
    for at in range(len(item)):
        for bit in (0, 7):
            item[at] ^= 1 << bit
            with pytest.raises(plain.NotPlain):
                plain.decode(item)
            item[at] ^= 1 << bit
    assert plain.decode(item) == value
    for damaged in (item[:-1], item + b"\0", item[: len(item) // 2], b"", item[:40]):
        with pytest.raises(plain.NotPlain):
            plain.decode(damaged)


def archive_of(pickled: bytes) -> bytes:
    """The archive that belongs around any bytes."""
    envelope = plain._envelope(len(pickled))
    return envelope.prefix + pickled + envelope.suffix(zlib.crc32(pickled))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.",
        b"\x80\x02]X\x01\0\0\0xR.",
        b"\x80\x02]}X\x05\0\0\0appendK\x01sb.",
        b"\x80\x02X\x01\0\0\0aQ.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02(lp0\nr\xff\xff\xff\x7f.",
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x02K\x01.K\x02.",
        b"not a pickle",
    ],
)
def test_hostile_pickles_are_not_read(pickled: bytes) -> None:
    with pytest.raises(plain.NotPlain):
        plain.decode(archive_of(pickled))


class Doubling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


class DoublingOurs(pyckpt.SavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


class Looking(DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) * 2


@pytest.mark.parametrize("planner", [Doubling, DoublingOurs, Looking])
def test_planners_that_change_objects_do(tmp_path: Path, planner: Any) -> None:
    for name in ("once", "again"):
        dcp.save(
            {"step": 21},
            storage_writer=pyckpt.DirectWriter(tmp_path / name),
            planner=planner(),
        )
        state = {"step": 0}
        dcp.load(state, checkpoint_id=tmp_path / name)
        assert state == {"step": 42}


def test_a_torch_that_writes_otherwise_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    real = torch.save

    def other(value: Any, file: Any) -> None:
        with config.patch({"save.storage_alignment": 128}):
            real(value, file)

    item = plain.encode(1)
    plain._is_known.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", other)
            with pytest.raises(plain.NotPlain):
                plain.encode(1)
            with pytest.raises(plain.NotPlain):
                plain.decode(item)
            assert "plain values are written slowly" in caplog.text
            dcp.save({"n": 5}, storage_writer=pyckpt.DirectWriter(tmp_path / "c"))
        state = {"n": 0}
        pyckpt.load(state, tmp_path / "c")
        assert state == {"n": 5}
    finally:
        plain._is_known.cache_clear()


def test_objects_are_read_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(objects, "_load", never)
    data = io.BytesIO(plain.encode([1, "two"]))
    assert objects.load(data, "key", device=torch.device("cpu")) == [1, "two"]
