"""Tensors and objects that tell DCP themselves which parts they hold, whatever their shape."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _staging import engine, metadata_of, overwrite, writer_to
from test_stager_process import can_have_a_process
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import pyckpt
from pyckpt.dcp import plans
from pyckpt.dcp.global_plan import global_plans
from pyckpt.errors import LoadError

WHOLE = torch.Size((8, 2))


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    plans.known_plans.clear()
    global_plans.clear()


def save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=writer_to(path), planner=pyckpt.SavePlanner())


def offsets_of(path: Path, key: str = "t") -> list[tuple[int, ...]]:
    item: Any = metadata_of(path).state_dict_metadata[key]
    return [tuple(chunk.offsets) for chunk in item.chunks]


# --- what their plans depend on -------------------------------------------------------------------


def items_of(begin: int, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
    offsets = torch.Size((begin, 0))
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, tensor.shape),
        properties=TensorProperties.create_from_tensor(tensor),
        size=WHOLE,
    )
    return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]


def set_part(tensor: torch.Tensor, begin: int) -> None:
    """Have a plain tensor say that it is a part of a larger one, as any torch asks it."""
    own: Any = tensor
    own.__create_write_items__ = functools.partial(items_of, begin)
    own.__get_tensor_shard__ = lambda index: tensor.detach()


def test_offsets_that_change_while_shapes_stay(tmp_path: Path) -> None:
    tensor = torch.rand(4, 2)
    for turn, begin in enumerate((0, 4, 4, 0)):
        set_part(tensor, begin)
        save(tmp_path / str(turn), {"t": tensor, "other": torch.rand(3)})
        assert offsets_of(tmp_path / str(turn)) == [(begin, 0)]


def test_a_tensor_that_comes_to_know_its_part(tmp_path: Path) -> None:
    """Its type and shape stay what they were."""
    tensor = torch.nn.Parameter(torch.rand(4, 2))
    save(tmp_path / "whole", {"t": tensor})
    set_part(tensor, 4)
    save(tmp_path / "part", {"t": tensor})
    del tensor.__create_write_items__, tensor.__get_tensor_shard__
    save(tmp_path / "whole again", {"t": tensor})
    found = [offsets_of(tmp_path / name) for name in ("whole", "part", "whole again")]
    assert found == [[(0, 0)], [(4, 0)], [(0, 0)]]


class Sometimes:
    """An object that says itself whether it is saved."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __create_write_items__(self, fqn: str, this: object) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)] if self.wanted else []


def test_objects_that_plan_themselves(tmp_path: Path) -> None:
    value = Sometimes(False)
    for turn, value.wanted in enumerate((False, True, True, False)):
        save(tmp_path / str(turn), {"t": value, "other": torch.rand(3)})
        keys = set(metadata_of(tmp_path / str(turn)).state_dict_metadata)
        assert keys == ({"t", "other"} if value.wanted else {"other"})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_of_another_size(tmp_path: Path, layout: torch.layout) -> None:
    for turn, rows in enumerate((3, 5, 3)):
        dense = torch.zeros(rows, 4)
        dense[1, 2] = turn + 1
        sparse = dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()
        path = tmp_path / str(turn)
        save(path, {"t": sparse})
        item: Any = metadata_of(path).state_dict_metadata["t"]
        assert item.size == (rows, 4)


class Prefixed(pyckpt.SavePlanner):
    """A class of a program's own that plans by something which no state dict shows."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {k: v for k, v in self.state_dict.items() if k.startswith(self.prefix)}


def test_planners_made_from_ours_plan_for_themselves(tmp_path: Path) -> None:
    state = {"a": torch.rand(3), "b": torch.rand(3)}
    save(tmp_path / "all", state)
    for turn, prefix in enumerate("abba"):
        path = tmp_path / str(turn)
        dcp.save(state, storage_writer=writer_to(path), planner=Prefixed(prefix))
        assert list(metadata_of(path).state_dict_metadata) == [prefix]
    save(tmp_path / "all again", state)
    assert list(metadata_of(tmp_path / "all again").state_dict_metadata) == ["a", "b"]


def dtensor_of_parts(mesh: Any, begin: int) -> DTensor:
    parts: Any = LocalShardsWrapper([torch.full((4, 2), float(begin))], [(begin, 0)])
    make: Any = DTensor.from_local
    made: DTensor = make(parts, mesh, [Shard(0)], run_check=False, shape=WHOLE, stride=(2, 1))
    return made


def save_dtensors_of_parts(path: Path) -> None:
    """As torchrec makes them: DTensor has the spec of the whole, its local tensor the offsets."""
    mesh = init_device_mesh("cpu", (1,))
    for turn, begin in enumerate((0, 4, 0)):
        save(path / str(turn), {"t": dtensor_of_parts(mesh, begin), "other": torch.rand(3)})
        assert offsets_of(path / str(turn)) == [(begin, 0)]


def test_dtensors_whose_local_tensor_knows_its_part(tmp_path: Path) -> None:
    run_ranks(1, save_dtensors_of_parts, tmp_path)


# --- CheckpointableTensor, since torch 2.15 -------------------------------------------------------


def checkpointable(begin: int, value: float, kind: type = torch.Tensor) -> torch.Tensor:
    """Rows of a padded buffer that are a part of a larger tensor."""
    tensor: Any = torch.full((5, 2), value)
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor)
    tensor.global_shape = tuple(WHOLE)
    tensor.global_offsets = ((begin, 0), (begin + 2, 0))
    tensor.local_offsets = ((0, 0), (3, 0))
    tensor.local_sizes = ((2, 2), (2, 2))
    return tensor


@pytest.fixture
def _protocol() -> None:
    pytest.importorskip("torch.distributed.checkpoint.protocol", reason="needs torch 2.15")


@pytest.mark.usefixtures("_protocol")
@pytest.mark.parametrize("mode", ["sync", "async", "foreign"])
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_checkpointable_tensors(tmp_path: Path, mode: str, kind: type) -> None:
    halves = [checkpointable(0, 1.0, kind), checkpointable(4, 2.0, kind)]
    with engine() as own:
        for turn, tensor in enumerate(halves):
            path = tmp_path / str(turn)
            path.mkdir()
            state = {"t": tensor, "other": torch.rand(3)}
            stager = pyckpt.PinnedStager(engine=own)
            if mode == "sync":
                save(path, state)
            elif mode == "async":
                writer = writer_to(path, stager=stager, engine=own)
                planner = pyckpt.SavePlanner()
                dcp.async_save(state, storage_writer=writer, planner=planner).result()
            else:
                writer = dcp.FileSystemWriter(path)
                response = dcp.async_save(state, storage_writer=writer, async_stager=stager)
                response.upload_completion.result()
            begin = 4 * turn
            assert offsets_of(path) == [(begin, 0), (begin + 2, 0)]
            item: Any = metadata_of(path).state_dict_metadata["t"]
            assert item.size == WHOLE
            for reader in (dcp.FileSystemReader(path), pyckpt.DirectReader(path)):
                check_part(reader, begin, turn + 1.0, kind)


def check_part(reader: Any, begin: int, value: float, kind: type) -> None:
    for load in (
        lambda state: dcp.load(state, storage_reader=reader),
        lambda state: pyckpt.load(state, reader=reader, trust_metadata=True),
    ):
        loaded = checkpointable(begin, 0.0, kind)
        load({"t": loaded})
        wanted = torch.full((5, 2), value)
        wanted[2] = 0  # between the parts: nobody's
        assert torch.equal(loaded.detach(), wanted)


@pytest.mark.usefixtures("_protocol")
def test_checkpointable_tensors_resharded(tmp_path: Path) -> None:
    whole = torch.arange(16.0).reshape(8, 2)
    save(tmp_path, {"t": whole})
    parts = checkpointable(3, 0.0)
    pyckpt.load({"t": parts}, tmp_path)
    assert torch.equal(parts[:2], whole[3:5])
    assert torch.equal(parts[3:], whole[5:7])
    meta = checkpointable(3, 0.0).to("meta")
    for name, value in vars(checkpointable(3, 0.0)).items():
        setattr(meta, name, value)
    state = {"t": meta}
    pyckpt.load(state, tmp_path)
    assert torch.equal(state["t"][:2], whole[3:5])
    assert vars(state["t"]) == vars(parts)
    too_large: Any = checkpointable(3, 0.0)
    too_large.global_shape = (9, 2)
    with pytest.raises(LoadError, match=r"\(8, 2\) is not \(9, 2\)"):
        pyckpt.load({"t": too_large}, tmp_path)


def save_in_a_process(path: Path) -> None:
    can_have_a_process()
    with engine() as own:
        for shared in (False, True):
            stager = pyckpt.PinnedStager(engine=own, shared_memory=shared)
            writer = writer_to(path / str(shared), stager=stager, engine=own)
            state = {"t": checkpointable(4, 2.0)}
            future = dcp.async_save(
                state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )
            overwrite(state)
            future.result()
            assert offsets_of(path / str(shared)) == [(4, 0), (6, 0)]
            check_part(pyckpt.DirectReader(path / str(shared)), 4, 2.0, torch.Tensor)


@pytest.mark.usefixtures("_protocol")
def test_checkpointable_tensors_in_a_background_process(tmp_path: Path) -> None:
    run_ranks(1, save_in_a_process, tmp_path)


# --- ShardedTensor --------------------------------------------------------------------------------


def sharded(ranks: list[int], fill: bool) -> Any:
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in ranks])
    tensor: Any = sharded_tensor.zeros(spec, 8, 2)
    whole = torch.arange(16.0).reshape(8, 2)
    for shard in tensor.local_shards():
        begin = shard.metadata.shard_offsets[0]
        if fill:
            shard.tensor.copy_(whole[begin : begin + len(shard.tensor)])
    return tensor


def load_sharded(path: Path) -> None:
    """Several shards on one rank, and none on the other."""
    warnings.simplefilter("ignore")  # these tensors are deprecated
    for ranks in ([0, 1], [1, 1], [1, 1, 0]):
        to = path / "-".join(map(str, ranks))
        save(to, {"t": sharded(ranks, fill=True), "other": torch.rand(3)})
        for other in ([0, 1], [1, 0], [1, 1], [0, 0, 0]):
            wanted = sharded(other, fill=True).local_shards()
            for load in (
                lambda state: pyckpt.load(state, to),  # noqa: B023
                lambda state: dcp.load(
                    state,
                    storage_reader=dcp.FileSystemReader(to),  # noqa: B023
                    planner=pyckpt.LoadPlanner(),
                ),
            ):
                state = {"t": sharded(other, fill=False)}
                load(state)
                found = state["t"].local_shards()
                assert len(found) == len(wanted)
                assert all(
                    torch.equal(a.tensor, b.tensor) for a, b in zip(found, wanted, strict=True)
                )
    if dist.get_rank() == 0:
        meta = sharded([0, 0], fill=False)
        for shard in meta.local_shards():
            shard.tensor = shard.tensor.to("meta")
        with pytest.raises(LoadError, match="t is a ShardedTensor on the meta device"):
            pyckpt.load({"t": meta}, path / "0-1", no_dist=True)


def test_sharded_tensors_with_any_number_of_shards(tmp_path: Path) -> None:
    run_ranks(2, load_sharded, tmp_path)
