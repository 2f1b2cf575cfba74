"""Template: the metadata of a save from that of the save before."""

from __future__ import annotations

import dataclasses
import pickle
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt.dcp.items import Packed, Place, unpack
from pyckpt.format.metadata import decode, storage_info
from pyckpt.format.template import Template

BIG = (1 << 62) - 1  # an offset and a length add up to a number that can be counted with


def tensor(key: str, name: str, offset: int, *, stride: Any = None) -> WriteResult:
    info = storage_info(
        name, offset, 1000, crc32=77, payload_offset=600, payload_length=300, payload_stride=stride
    )
    return WriteResult(MetadataIndex(key, [0]), 1000, info)


def object_(key: str, name: str, offset: int, length: int) -> WriteResult:
    info = storage_info(
        name, offset, length, crc32=78, payload_offset=0, payload_length=length, payload_stride=None
    )
    return WriteResult(MetadataIndex(key), length, info)


NAMES = ["__0_aaaa.distcp", "__1_bbbb.distcp", ""]
LATER = ["__0_cccc.distcp", "__1_dddd.distcp", ""]


def results() -> list[list[WriteResult]]:
    return [
        [
            tensor("a", NAMES[0], 0),
            object_("b", NAMES[0], 1000, 40),
            tensor("c", NAMES[0], 1040, stride=(1,)),
        ],
        [object_("d", NAMES[1], 0, 9), object_("e", NAMES[1], 9, 500)],
        [],
    ]


def metadata_for(of_ranks: list[list[WriteResult]]) -> Metadata:
    described: dict[str, Any] = {}
    for of_rank in of_ranks:
        for result in of_rank:
            described[result.index.fqn] = (
                BytesStorageMetadata()
                if result.index.offset is None
                else TensorStorageMetadata(
                    TensorProperties(torch.float32),
                    torch.Size([75]),
                    [ChunkStorageMetadata(torch.Size([0]), torch.Size([75]))],
                )
            )
    metadata = Metadata(described, {"a": ("a",), "big": (1 << 62, b"\x8a\x08")})
    metadata.version = "1"
    return metadata


def packed(places: list[list[Place]]) -> list[bytes]:
    return [b"".join(struct.pack("=5Q", *place) for place in of_rank) for of_rank in places]


def later_places(number: Any) -> list[list[Place]]:
    """Of a later save, with numbers of anyone's choice where they may change."""

    def of_tensor() -> Place:
        return Place(number(), 1000, 600, 300, number() % (1 << 32))

    def of_object() -> Place:
        length = number()
        return Place(number(), length, 0, length, number() % (1 << 32))

    return [[of_tensor(), of_object(), of_tensor()], [of_object(), of_object()], []]


@settings(max_examples=25, derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 30), path=st.text(max_size=400), top=st.sampled_from([9, 300, BIG]))
def test_filled_as_encoded(seed: int, path: str, top: int) -> None:
    """For any numbers, and any path."""
    numbers = random.Random(seed)
    before = results()
    metadata = metadata_for(before)
    places = later_places(lambda: numbers.choice([0, 1, top, numbers.randint(0, top)]))
    data = Template(metadata, before).fill(path, "f" * 32, LATER, packed(places))
    assert data is not None
    filled = decode(data, path="of a template")
    assert filled.state_dict_metadata == metadata.state_dict_metadata
    assert filled.planner_data == metadata.planner_data
    assert filled.version == metadata.version
    assert (str(filled.storage_meta.checkpoint_id), filled.storage_meta.save_id) == (path, "f" * 32)
    expected = {
        result.index: vars(result.storage_data)
        for rank, of_rank in enumerate(before)
        if of_rank
        for result in unpack(Packed(LATER[rank], packed(places)[rank]), of_rank)
    }
    assert {index: vars(info) for index, info in filled.storage_data.items()} == expected
    assert [index.index for index in filled.storage_data] == [index.index for index in expected]


def test_used_again() -> None:
    template = Template(metadata_for(results()), results())
    numbers = random.Random(0)
    first = packed(later_places(lambda: numbers.randint(0, BIG)))
    second = packed(later_places(lambda: numbers.randint(0, BIG)))
    once = template.fill("/a", "0" * 32, LATER, first)
    assert template.fill("/bb", "1" * 32, NAMES, second) != once
    assert template.fill("/a", "0" * 32, LATER, first) == once


@pytest.mark.parametrize("field", ["length", "payload_offset", "payload_length"])
def test_more_has_changed_than_there_is_room_for(field: str) -> None:
    places = later_places(lambda: 5)
    places[0][0] = places[0][0]._replace(**{field: 601})
    template = Template(metadata_for(results()), results())
    assert template.fill("/a", "0" * 32, LATER, packed(places)) is None


def test_names_of_other_length() -> None:
    template = Template(metadata_for(results()), results())
    names = [LATER[0], LATER[1] + "x", ""]
    assert template.fill("/a", "0" * 32, names, packed(later_places(lambda: 5))) is None


def test_stock_unpickles_it() -> None:
    template = Template(metadata_for(results()), results())
    data = template.fill("/a", "0" * 32, LATER, packed(later_places(lambda: 5)))
    assert data is not None
    metadata = pickle.loads(data)
    assert [f.name for f in dataclasses.fields(metadata)] == [
        f.name for f in dataclasses.fields(Metadata)
    ]
    assert metadata.storage_data[MetadataIndex("d")].offset == 5
