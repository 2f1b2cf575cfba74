"""What a load reads without Python for each item: the same as where it makes an item for each."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import pyckpt
from pyckpt import _C
from pyckpt.dcp import filling, reading
from pyckpt.dcp.planner import LoadPlanner
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.format import metadata as metadata_format
from pyckpt.format import plain
from pyckpt.format.columns import columns_of

PAGE = 4096
ATOMS = [
    *(None, True, False, 0, 1, 255, 256, 65535, 65536, -1, -256, 2**31 - 1, -(2**31)),
    *(2**31, 2**63, -(2**200), 0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324),
    *("", "a", "ü" * 40, "\ud800", "\0", "x" * 300, "x" * 70_000),
]
OTHERS = [(1, "two"), [1, [2]], b"bytes", 1 + 2j, torch.float16]


def save(state: dict[str, Any], path: Path) -> Path:
    writer = pyckpt.DirectWriter(path, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner(), no_dist=True)
    return path


def plain_keys(state: dict[str, Any], path: Path) -> set[str]:
    """The keys of a state that are read without an item."""
    columns = columns_of(metadata_format.read(path / ".metadata"))
    assert columns is not None
    planner = LoadPlanner(missing="keep", mismatched="keep")
    planner._items_stay = planner._reads_plain = True
    planner.set_up_planner(state, metadata_format.read(path / ".metadata"), True)
    planner.create_local_plan()
    return set() if planner._plain is None else set(planner._plain.names())


def one_by_one(state: dict[str, Any], path: Path, **options: Any) -> pyckpt.LoadReport:
    """Load with an item for each key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadPlanner, "_take_plain", lambda self: self.state_dict)
        return pyckpt.load(state, path, **options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            and torch.equal(a, b)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)  # -0.0 is not 0.0
    return type(a) is type(b) and bool(a == b)


def check_same(state: dict[str, Any], path: Path, **options: Any) -> pyckpt.LoadReport:
    """Load both ways; values and reports must be the same."""
    here, there = copy.deepcopy(state), copy.deepcopy(state)
    report = pyckpt.load(here, path, **options)
    expected = one_by_one(there, path, **options)
    assert same(here, there)
    # What is read twice, between what is plain and what is not, is a matter of both.
    ours, theirs = (dataclasses.replace(one, seconds=0, bytes=0) for one in (report, expected))
    assert ours == theirs
    return report


# --- objects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*ATOMS, *OTHERS], ids=lambda value: repr(value)[:20])
def test_an_object_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    save({"a": value}, tmp_path)
    state = {"a": 7}
    report = pyckpt.load(state, tmp_path)
    assert same(state["a"], value)
    assert (report.loaded, report.not_verified) == (["a"], [])
    check_same({"a": 7}, tmp_path)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.tuples(st.integers()),
        min_size=1,
    )
)
def test_any_objects(tmp_path_factory: pytest.TempPathFactory, saved: dict[str, Any]) -> None:
    path = save(saved, tmp_path_factory.mktemp("objects"))
    state = dict.fromkeys(saved)
    pyckpt.load(state, path)
    assert all(same(state[key], value) for key, value in saved.items())


def test_what_was_in_an_objects_place_gives_way(tmp_path: Path) -> None:
    save({"a": 1, "b": 2, "c": "three", "l": [1, torch.zeros(1)]}, tmp_path)
    state = {"a": torch.ones(3), "b": [1, 2], "c": None, "l": [5, torch.ones(1)]}
    report = check_same(state, tmp_path)
    assert [replacement.key for replacement in report.replaced] == ["a", "b"]


def envelope(pickled: bytes) -> bytes:
    """An item of a pickle, as it would be if torch.save wrote that pickle."""
    around = plain.envelope_of(len(pickled))
    assert around is not None
    return around.prefix + pickled + around.suffix(zlib.crc32(pickled))


def object_in_place_of(path: Path, item: bytes) -> None:
    """Have the checkpoint at ``path`` hold ``item``, with a checksum that is right, as its one
    object."""
    metadata = metadata_format.read(path / ".metadata")
    ((index, info),) = metadata.storage_data.items()
    where = path / info.relative_path
    where.write_bytes(item)
    metadata.storage_data = {
        index: metadata_format.storage_info(
            info.relative_path,
            0,
            len(item),
            crc32=zlib.crc32(item),
            payload_offset=0,
            payload_length=len(item),
        )
    }
    (path / ".metadata").write_bytes(metadata_format.encode(metadata))


HEAD = b"\x80\x02"
ODD = {
    "no end": HEAD + b"K\x05",
    "bytes behind its end": HEAD + b"K\x05.K",
    "number cut short": HEAD + b"M\x05.",
    "float cut short": HEAD + b"G1234.",
    "string longer than the item": HEAD + b"X\xff\xff\xff\xff" + b"abc.",
    "string that is not remembered": HEAD + b"X\1\0\0\0a.",
    "string remembered elsewhere": HEAD + b"X\1\0\0\0aq\1.",
    "string that is not UTF-8": HEAD + b"X\1\0\0\0\xffq\0.",
    "protocol 4": b"\x80\x04K\x05.",
    "function": HEAD + b"cos\ngetpid\n)R.",
    "nothing": b".",
}


@pytest.mark.parametrize("pickled", ODD.values(), ids=ODD)
def test_an_odd_pickle_is_read_as_torch_reads_it(tmp_path: Path, pickled: bytes) -> None:
    save({"a": 1}, tmp_path)
    object_in_place_of(tmp_path, envelope(pickled))
    outcomes = []
    for load in (pyckpt.load, one_by_one):
        state = {"a": 7}
        try:
            load(state, tmp_path)
            outcomes.append(("loaded", state["a"]))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("cut", [1, 64, 200])
def test_an_item_cut_short_or_changed_is_read_as_torch_reads_it(tmp_path: Path, cut: int) -> None:
    """The checksum of the item is right, so only its bytes tell."""
    save({"a": 1}, tmp_path)
    whole = envelope(pickle.dumps(5, 2))
    for item in (whole[:-cut], whole[:-cut] + b"?" + whole[len(whole) - cut + 1 :]):
        object_in_place_of(tmp_path, item)
        errors = []
        for load in (pyckpt.load, one_by_one):
            state = {"a": 7}
            try:
                load(state, tmp_path)
                errors.append(f"loaded {state['a']}")
            except CorruptCheckpoint as error:
                errors.append(str(error))
        assert errors[0] == errors[1]


def test_objects_where_torch_writes_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": 1, "t": torch.ones(2)}, tmp_path)
    monkeypatch.setattr(plain, "_is_known", lambda: False)
    state = {"a": 7, "t": torch.zeros(2)}
    pyckpt.load(state, tmp_path)
    assert state["a"] == 1
    assert state["t"].tolist() == [1, 1]


# --- tensors --------------------------------------------------------------------------------------


def test_what_is_plain(tmp_path: Path) -> None:
    """The others are read as well, one by one."""
    saved: dict[str, Any] = {
        "float": torch.rand(3, 4),
        "scalar": torch.tensor(3.5),
        "prime": torch.rand(10_007),
        "parameter": torch.nn.Parameter(torch.rand(PAGE // 4)),
        "bfloat16": torch.rand(PAGE + 1).to(torch.bfloat16),
        "bool": torch.rand(PAGE - 1) > 0.5,
        "number": 5,
        "empty": torch.rand(0, 3),
        "columns": torch.rand(4, 3).t(),
        "tuple": (1, 2),
        "converted": torch.rand(3),
        "strided": torch.rand(5),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.rand(3, dtype=torch.complex64),
        "expanded": torch.rand(1),
        "to make": torch.rand(2),
        "to grow": torch.rand(2),
        "parts": torch.rand(4),
    }
    save(saved, tmp_path)
    state = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in saved.items()
    }
    state["parameter"] = torch.nn.Parameter(torch.zeros(PAGE // 4))
    state["converted"] = torch.zeros(3, dtype=torch.float64)
    state["strided"] = torch.zeros(10)[::2]
    state["conjugate"] = torch.zeros(3, dtype=torch.complex64).conj()
    state["to make"] = torch.empty(2, device="meta")
    state["to grow"] = torch.empty(0)
    state["parts"].global_offsets = (0,)
    found = plain_keys(dict(state), tmp_path)
    assert found == {
        *("float", "scalar", "prime", "parameter", "bfloat16", "bool", "number"),
        # Which say nothing of where they are from: they are memory, whatever they are called.
        *("expanded", "tuple"),
    }
    parameter = state["parameter"]
    del state["parts"], saved["parts"]
    report = pyckpt.load(state, tmp_path)
    assert state["parameter"] is parameter
    assert (
        report.loaded
        == [key for key in state if key not in ("to make", "to grow", "number", "tuple")]
        or set(report.loaded) >= found
    )
    for key, value in saved.items():
        got = state[key]
        if key == "sparse":
            got, value = got.to_dense(), value.to_dense()
        if isinstance(value, torch.Tensor):
            assert torch.equal(got, value.to(got.dtype)), key
        else:
            assert got == value, key


def test_the_report_keeps_the_order_of_the_state(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(9)]
    save({name: torch.rand(3) for name in names}, tmp_path)
    # Each third is read one by one.
    state = {
        name: torch.zeros(3, dtype=torch.float64 if i % 3 == 0 else torch.float32)
        for i, name in enumerate(reversed(names))
    }
    assert plain_keys(state, tmp_path) == {*names} - {"t8", "t5", "t2"}
    report = check_same(state, tmp_path)
    assert report.loaded == sorted(names)  # DCP sorts a state's entries


def test_policies_with_plain_keys_between(tmp_path: Path) -> None:
    save({"m": {"a": torch.rand(3), "b": 2, "gone": torch.rand(2), "c": torch.rand(3)}}, tmp_path)
    state = {"m": {"a": torch.zeros(3), "new": torch.zeros(1), "b": 0, "c": torch.zeros(2)}}
    report = check_same(state, tmp_path, missing="keep", mismatched="keep", unexpected="ignore")
    assert report.kept == ["m.new", "m.c"]
    assert "m.gone" in report.unexpected
    filled = check_same(state, tmp_path, missing="keep", mismatched="keep")
    assert "m.gone" in filled.filled
    with pytest.raises(LoadError, match=r"m\.new"):
        pyckpt.load(state, tmp_path)
    assert state["m"]["a"].tolist() == [0, 0, 0]  # nothing was loaded


def test_tied_tensors_are_read_in_their_order(tmp_path: Path) -> None:
    """Two keys of one memory: the later one in the file stays, however many are tied."""
    saved = {f"t{i}": torch.full((6,), float(i)) for i in range(5)}
    save(saved, tmp_path)
    memory = torch.zeros(20)
    state = {
        "t0": memory[:6],
        "t1": memory[:6],
        "t2": memory[4:10],  # its first two elements are the last of those
        "t3": memory[10:16],
        "t4": torch.zeros(6),
    }
    assert plain_keys(dict(state), tmp_path) == {"t3", "t4"}
    pyckpt.load(state, tmp_path)
    assert memory.tolist() == [1] * 4 + [2] * 6 + [3] * 6 + [0] * 4
    assert state["t4"].tolist() == [4] * 6


def test_freed_memory_is_refused(tmp_path: Path) -> None:
    save({"t": torch.rand(100)}, tmp_path)
    state = {"t": torch.zeros(100)}
    state["t"].untyped_storage().resize_(0)
    with pytest.raises((ValueError, LoadError)):
        pyckpt.load(state, tmp_path)


def test_memory_freed_after_the_plan_is_refused(tmp_path: Path) -> None:
    columns = columns_of(metadata_format.read(save({"t": torch.rand(100)}, tmp_path) / ".metadata"))
    assert columns is not None
    reads = _C.PlainReads(columns, object_bytes=0)
    tensor = torch.zeros(100)
    assert reads.take({"t": tensor}) == []
    tensor.untyped_storage().resize_(0)
    with pyckpt.Engine() as engine:
        job = _C.ReadJob(engine.native)
        job.add_file(str(tmp_path / reads.files()[0]))
        with pytest.raises(ValueError, match="memory was freed"):
            reads.give(job, 0, 1)


def test_objects_beyond_the_memory_for_them_are_read_one_by_one(tmp_path: Path) -> None:
    saved = {f"s{i}": "x" * 1000 for i in range(10)}
    columns = columns_of(metadata_format.read(save(saved, tmp_path) / ".metadata"))
    assert columns is not None
    size = columns.place(0)[2]
    reads = _C.PlainReads(columns, object_bytes=3 * size + 1)
    assert len(reads.take(dict.fromkeys(saved))) == 7
    assert len(reads) == 3


def test_several_files_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks write them."""
    saved = {f"t{i}": torch.rand(50) for i in range(7)} | {f"n{i}": i for i in range(7)}
    save(saved, tmp_path)
    metadata = metadata_format.read(tmp_path / ".metadata")
    places = dict(metadata.storage_data.items())
    for number, (index, info) in enumerate(places.items()):
        name = f"__{number % 5}_0.distcp"
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes((tmp_path / info.relative_path).read_bytes())
        places[index] = dataclasses.replace(info, relative_path=name)
        vars(places[index]).update(
            {key: value for key, value in vars(info).items() if key not in vars(places[index])}
        )
    metadata.storage_data = places
    metadata.state_dict_metadata = metadata.state_dict_metadata.copy()
    (tmp_path / ".metadata").write_bytes(metadata_format.encode(metadata))
    for name, size in metadata_format.data_files(metadata).items():
        with (tmp_path / name).open("r+b") as file:
            file.truncate(size)
    for module in (filling, reading):
        monkeypatch.setattr(module, "FILES_MAX", 2)
    state = {key: torch.zeros(50) if key[0] == "t" else -1 for key in saved}
    assert plain_keys(dict(state), tmp_path) == {*saved}
    reader = pyckpt.DirectReader(tmp_path)
    pyckpt.load(state, reader=reader)
    assert same(state, saved)
    assert len(reader._loads[-1].jobs) == 3


# --- verification ---------------------------------------------------------------------------------


def flip(path: Path, key: str) -> Any:
    """Flip a bit in the middle of a key's payload; return where it is."""
    metadata = metadata_format.read(path / ".metadata")
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    at = info.offset + info.payload_offset + info.payload_length // 2
    with (path / info.relative_path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    return info


def test_damage_is_named(tmp_path: Path) -> None:
    saved = {"a": torch.rand(100), "b": torch.rand(100), "n": 5, "z": torch.rand(3)}
    save(saved, tmp_path)
    infos = {key: flip(tmp_path, key) for key in ("b", "n", "z")}
    state = {"a": torch.zeros(100), "b": torch.zeros(100), "n": 0, "z": torch.zeros(3)}
    assert plain_keys(dict(state), tmp_path) == {*saved}
    with pytest.raises(CorruptCheckpoint, match="1 more items are damaged") as caught:
        pyckpt.load(state, tmp_path)
    info = infos["b"]
    assert caught.value.key == "b"
    assert caught.value.offset == info.offset + info.payload_offset
    assert caught.value.expected == info.crc32
    assert caught.value.path == str(tmp_path / info.relative_path)
    assert state["n"] == 0
    flip(tmp_path, "b")
    flip(tmp_path, "z")
    with pytest.raises(CorruptCheckpoint) as caught:
        pyckpt.load(state, tmp_path)
    assert (caught.value.key, caught.value.offset) == ("n", infos["n"].offset)
    assert state["n"] == 0
    flip(tmp_path, "n")
    assert pyckpt.load(state, tmp_path).not_verified == []
    assert same(state, saved)


def test_nothing_is_verified_where_nothing_is_to_be(tmp_path: Path) -> None:
    saved = {"a": torch.rand(100), "n": 5}
    save(saved, tmp_path)
    flip(tmp_path, "a")
    state = {"a": torch.zeros(100), "n": 0}
    report = pyckpt.load(state, tmp_path, verify="none")
    assert sorted(report.not_verified) == ["a", "n"]
    assert int((state["a"] != saved["a"]).sum()) == 1


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    save({"a": torch.rand(100), "n": 5}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - 1)
    with pytest.raises(CorruptCheckpoint, match=r"bytes, and \d+ were saved"):
        pyckpt.load({"a": torch.zeros(100), "n": 0}, tmp_path)


# --- misuse ---------------------------------------------------------------------------------------


def test_misuse_is_refused(tmp_path: Path) -> None:
    columns = columns_of(metadata_format.read(save({"t": torch.ones(3)}, tmp_path) / ".metadata"))
    assert columns is not None
    reads = _C.PlainReads(columns, object_bytes=0)
    assert reads.take({"t": torch.zeros(3), "not saved": 1, 5: 6}) == ["not saved", 5]  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="already"):
        reads.take({"t": torch.zeros(3)})
    with pyckpt.Engine() as engine:
        job = _C.ReadJob(engine.native)
        with pytest.raises(ValueError, match="no file of this number"):
            reads.give(job, 0, 1)
        job.add_file(str(tmp_path / reads.files()[0]))
        reads.give(job, 0, 1)
        with pytest.raises(ValueError, match="another job's"):
            reads.check([])
        job.run()


def test_columns_without_places_are_refused() -> None:
    columns = _C.Columns()
    columns.add_object("a")
    reads = _C.PlainReads(columns, object_bytes=100)
    assert reads.take({"a": 1}) == ["a"]
    assert reads.objects(lambda size: None) == ([], [], [])


def test_a_readers_own_class_is_given_an_item_for_each(tmp_path: Path) -> None:
    """It may look at them."""

    class Looks(pyckpt.DirectReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            self.seen = [item.storage_index.fqn for item in plan.items]
            return super().read_data(plan, planner)

    save({"a": torch.ones(3), "n": 5}, tmp_path)
    state = {"a": torch.zeros(3), "n": 0}
    reader = Looks(tmp_path)
    pyckpt.load(state, reader=reader)
    assert sorted(reader.seen) == ["a", "n"]
    assert state["n"] == 5


# --- the program runs in between ------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", torch.zeros(8, dtype=torch.int32)),
        lambda t: setattr(t, "data", torch.zeros(8, dtype=torch.float16)),
        lambda t: t.resize_(12),
        lambda t: setattr(t, "data", torch.zeros(16)[::2]),
    ],
)
@pytest.mark.parametrize("verify", ["items", "none"])
def test_a_tensor_that_changes_while_the_load_is_planned_is_refused(
    tmp_path: Path, change: Any, verify: Any
) -> None:
    save({"m": {"a": torch.arange(8.0), "b": torch.ones(2)}}, tmp_path)
    tensor = torch.zeros(8)

    def create(key: str, metadata: Any) -> None:
        change(tensor)

    with pytest.raises((ValueError, LoadError), match=r"dtype or shape of m\.a has changed"):
        pyckpt.load({"m": {"a": tensor}}, tmp_path, create=create, verify=verify)


@pytest.mark.parametrize(
    "make",
    [torch._efficientzerotensor, lambda shape: torch._to_functional_tensor(torch.ones(shape))],
)
def test_tensors_without_memory_are_not_plain(tmp_path: Path, make: Any) -> None:
    save({"a": torch.rand(2, 3)}, tmp_path)
    state = {"a": make((2, 3))}
    assert plain_keys(dict(state), tmp_path) == set()
    with pytest.raises((LoadError, RuntimeError)):
        pyckpt.load(state, tmp_path)


def test_objects_stay_where_a_tensor_is_damaged(tmp_path: Path) -> None:
    save({"m": {"n": 5, "w": torch.rand(100)}}, tmp_path)
    flip(tmp_path, "m.w")
    for dtype in (torch.float32, torch.float64):  # plain, and one by one
        state = {"m": {"n": 0, "w": torch.zeros(100, dtype=dtype)}}
        with pytest.raises(CorruptCheckpoint, match=r"m\.w"):
            pyckpt.load(state, tmp_path)
        assert state["m"]["n"] == 0


def test_memory_that_others_are_read_into_is_not_plain(tmp_path: Path) -> None:
    save({"a": torch.ones(6, dtype=torch.float64), "b": torch.full((6,), 2.0)}, tmp_path)
    memory = torch.zeros(6)
    state = {"a": memory, "b": memory}
    assert plain_keys(dict(state), tmp_path) == set()
    check_same(state, tmp_path)
    pyckpt.load(state, tmp_path)
    assert memory.tolist() == [2] * 6


def test_objects_before_they_are_read(tmp_path: Path) -> None:
    columns = columns_of(metadata_format.read(save({"n": 5}, tmp_path) / ".metadata"))
    assert columns is not None
    reads = _C.PlainReads(columns, object_bytes=1 << 20)
    assert reads.take({"n": 0}) == []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing was read"):
            reads.objects(lambda size: None)
        with pyckpt.Engine() as engine:
            job = _C.ReadJob(engine.native)
            job.add_file(str(tmp_path / reads.files()[0]))
            reads.give(job, 0, 1)
            assert reads.check(job.run()) == []
        assert reads.objects(plain.envelope_of)[:2] == (["n"], [5])
