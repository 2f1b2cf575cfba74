"""What a save reads stays allocated, whatever the program does to the storages meanwhile."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _forks import status_of_child
from _sampling import slow
from _staging import check_saved, engine, frozen, outcome, slowed, writer_to

import pyckpt

SIZE = 4 << 20  # bytes that the allocator gives back to the system at once: to read them is a crash


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def give_other_memory(tensor: torch.Tensor) -> None:
    free(tensor)
    tensor.untyped_storage().resize_(tensor.nbytes)
    tensor.fill_(-1)


def move_to_shared_memory(tensor: torch.Tensor) -> None:
    tensor.share_memory_()
    tensor.fill_(-1)


@pytest.mark.parametrize("change", [free, slow(give_other_memory), move_to_shared_memory])
def test_memory_that_the_program_gives_away(
    tmp_path: Path, change: Callable[[torch.Tensor], None]
) -> None:
    """Between a save and the step, in which FSDP does so."""

    def body() -> None:
        with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
            # Views of one storage, as those of a flat parameter.
            flat = torch.rand(SIZE // 4)
            parameters = [torch.nn.Parameter(part) for part in flat.chunk(3)]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
            state = {f"{i}": parameter for i, parameter in enumerate(parameters)}
            before = frozen(state)
            for last in [False, True]:
                writer = writer_to(tmp_path, stager=stager, engine=own)
                with slowed(own):
                    future = dcp.async_save(state, storage_writer=writer)
                    if last:
                        change(flat)
                future.result()
                check_saved(before, tmp_path)

    assert status_of_child(body) == 0


def test_memory_that_found_no_room_and_is_gone(tmp_path: Path) -> None:
    """What the writer was not given yet it cannot read any more, and says so."""

    def body() -> None:
        with engine(max_pinned_bytes=2 << 20) as own:
            parameter = torch.nn.Parameter(torch.rand(SIZE // 4))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
            staging, copies = stager.begin({"weight": parameter}, direct=True)
            assert copies["weight"] is parameter
            parameter.data.untyped_storage().resize_(0)
            writer = writer_to(tmp_path, engine=own)
            error = outcome(lambda: dcp.save(copies, storage_writer=writer, no_dist=True))
            assert "its memory was freed" in str(error)
            staging.release()

    assert status_of_child(body) == 0


def test_storages_go_on_as_ever(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.rand(SIZE // 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with engine(max_pinned_bytes=256 << 20) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        address = parameter.data_ptr()
        for turn in range(3):
            writer = writer_to(tmp_path / str(turn), stager=stager, engine=own)
            dcp.async_save({"weight": parameter}, storage_writer=writer).result()
        assert parameter.data_ptr() == address
        before = parameter.detach().clone()
        file = io.BytesIO()
        torch.save(parameter.detach(), file)
        file.seek(0)
        assert torch.equal(torch.load(file), before)
        assert torch.equal(copy.deepcopy(parameter), before)
        storage = parameter.untyped_storage()
        storage.resize_(2 * SIZE)
        assert torch.equal(parameter, before)
        assert not parameter.is_shared()
        parameter.data.share_memory_()
        assert parameter.is_shared()
        assert torch.equal(parameter, before)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_goes_when_nobody_reads_it(tmp_path: Path) -> None:
    """Neither the storage nor a save that is over keeps what the other let go of."""
    size = 64 << 20
    with engine(max_pinned_bytes=256 << 20) as own:
        parameter = torch.nn.Parameter(torch.rand(size // 4))
        stager = pyckpt.PinnedStager(engine=own, optimizers=[torch.optim.SGD([parameter], lr=0.1)])
        for turn in range(2):
            writer = writer_to(tmp_path / str(turn), stager=stager, engine=own)
            dcp.async_save({"weight": parameter}, storage_writer=writer).result()
        before = resident_bytes()
        parameter.data.untyped_storage().resize_(0)
        assert before - resident_bytes() > size // 2


def test_memory_of_others_that_is_gone_is_noticed() -> None:
    """Only torch's own can be kept. That of a storage that shares its memory when it is written to
    goes when it is. If the copy was made before that, it is sound."""
    for _ in range(20):
        parameter = torch.nn.Parameter(torch.rand(SIZE // 4))
        lazy = torch._lazy_clone(parameter.data)
        stager_of = torch.optim.SGD([lazy], lr=0.1)
        with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
            stager = pyckpt.PinnedStager(engine=own, optimizers=[stager_of])
            with slowed(own):
                staging, copies = stager.begin({"weight": lazy}, direct=True)
                lazy.fill_(1)  # has memory of its own from now on
            failure = staging.staged.exception(60)
            if failure is None:
                staging.check()
                assert torch.equal(copies["weight"], parameter)
                staging.release()
                continue
            with pytest.raises(RuntimeError, match="call wait_staged"):
                staging.staged.result(60)
            with pytest.raises(RuntimeError, match="call wait_staged"):
                staging.check()
            staging.release()
            return
    raise AssertionError("each copy was made before the memory went")
