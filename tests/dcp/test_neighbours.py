"""Ranks of one host, which copy from each other's memory what one of them has read."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import RanksFailed, run_ranks
from _sampling import slow

import pyckpt
from pyckpt.dcp import neighbours, sharing
from pyckpt.dcp.neighbours import HELLO, Neighbours
from pyckpt.engine import default_engine
from pyckpt.errors import CorruptCheckpoint, LoadError

SIZE = 300_000  # elements of a large tensor
LARGE = 4 * SIZE


def _state() -> dict[str, Any]:
    return {
        "large": {f"{i}": torch.arange(SIZE) * 1.0 + i for i in range(6)},
        "columns": (torch.arange(SIZE) * 3.0).reshape(500, 600),
        "small": {f"{i}": torch.full((i + 1,), float(i)) for i in range(4)},
        "step": 12,
    }


def _empty() -> dict[str, Any]:
    return {
        "large": {f"{i}": torch.zeros(SIZE) for i in range(6)},
        "columns": torch.zeros(600, 500).t(),
        "small": {f"{i}": torch.zeros(i + 1) for i in range(4)},
        "step": 0,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    dcp.save(_state(), storage_writer=pyckpt.DirectWriter(path, sync_files=False), no_dist=True)
    return path


def _check(found: dict[str, Any]) -> None:
    expected = _state()
    for name in ("large", "small"):
        for key, value in expected[name].items():
            assert torch.equal(found[name][key], value), (name, key)
    assert torch.equal(found["columns"], expected["columns"])
    assert found["step"] == 12


def _load(path: Path, share_reads: bool | None) -> int:
    """Bytes that this rank read."""
    sharing.WORTH_BYTES = LARGE
    found = _empty()
    large = list(found["large"].values())
    before = [one._version for one in large]
    reader = pyckpt.DirectReader(path)
    report = pyckpt.load(found, reader=reader, share_reads=share_reads)
    # Autograd sees the change, whichever rank has read it.
    assert all(one._version > was for one, was in zip(large, before, strict=True))
    assert report.not_verified == []
    _check(found)
    return reader.statistics.bytes


def _load_without_sends(path: Path, share_reads: bool | None) -> int:
    """Only what is no piece of memory goes through the process group."""
    original = dist.isend
    sent = []

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.isend = isend
    count = _load(path, share_reads)
    assert sum(sent) <= LARGE + 4096
    if share_reads is None:
        assert not sent
    return count


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize("share_reads", [None, True])
def test_ranks_of_a_host_read_once_and_copy(
    path: Path, ranks: int, share_reads: bool | None
) -> None:
    counts = run_ranks(ranks, _load_without_sends, path, share_reads)
    # Unasked, each reads for itself what is small, or lies otherwise than in the file.
    alone = 0 if share_reads else (ranks - 1) * LARGE
    assert 7 * LARGE <= sum(counts) <= 7 * LARGE + alone + ranks * 64 * 1024
    assert max(counts) < 7 * LARGE


@pytest.mark.slow
def test_ranks_that_must_not_share_read_everything(path: Path) -> None:
    counts = run_ranks(2, _load, path, False)
    assert min(counts) >= 7 * LARGE


def _load_little(path: Path) -> int:
    found = _empty()
    reader = pyckpt.DirectReader(path)
    pyckpt.load(found, reader=reader)
    _check(found)
    return reader.statistics.bytes


@pytest.mark.slow
def test_little_is_not_shared_unasked(path: Path) -> None:
    assert min(run_ranks(2, _load_little, path)) >= 7 * LARGE


def _load_differing(path: Path) -> tuple[int, int]:
    """Each half of the ranks wants other tensors."""
    sharing.WORTH_BYTES = LARGE
    half = dist.get_rank() // 2
    keys = [f"{i}" for i in range(3 * half, 3 * half + 3)]
    found = {"large": {key: torch.zeros(SIZE) for key in keys}}
    reader = pyckpt.DirectReader(path)
    pyckpt.load(found, reader=reader, unexpected="ignore")
    for key in keys:
        assert torch.equal(found["large"][key], _state()["large"][key])
    return half, reader.statistics.bytes


def _make_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _load_over_a_backend_of_ones_own(path: Path) -> list[int]:
    dist.Backend.register_backend("mine", _make_gloo, devices=["cpu"])
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "mine", store=dist.PrefixStore("mine", store), rank=rank, world_size=size
    )
    return [_load(path, None), _load(path, False)]


def test_over_an_unknown_backend_each_reads_for_itself_unasked(path: Path) -> None:
    for unasked, alone in run_ranks(2, _load_over_a_backend_of_ones_own, path):
        # Where the allocator put a tensor decides which pages at its ends are read twice.
        assert abs(unasked - alone) <= 64 * 1024


@pytest.mark.slow
def test_only_ranks_that_want_the_same_share_unasked(path: Path) -> None:
    for count in (counts := [count for _, count in run_ranks(4, _load_differing, path)]):
        assert LARGE <= count <= 2 * LARGE + 64 * 1024, counts


# --- where ranks cannot copy ---


def _hide() -> None:
    """Keep the other ranks from reading this one, also where they are root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    for at in range(3):  # effective, permitted, inheritable
        capabilities[at] &= ~(1 << 19)  # CAP_SYS_PTRACE
    assert libc.capset(header, capabilities) == 0
    if dist.get_rank() == 0:
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


def _load_hidden(path: Path, share_reads: bool | None) -> tuple[int, bool]:
    _hide()
    tried = []
    original = Neighbours.probe

    def probe(self: Neighbours, ranks: Any) -> bool:
        works = original(self, ranks)
        tried.append(works)
        return works

    Neighbours.probe = probe  # type: ignore[method-assign]
    count = _load(path, share_reads)
    (works,) = tried
    return count, works


def test_where_a_rank_may_not_be_read_each_reads_for_itself(path: Path) -> None:
    answers = run_ranks(3, _load_hidden, path, None)
    assert [works for _, works in answers] == [True, False, False]
    assert min(count for count, _ in answers) >= 7 * LARGE


def test_where_a_rank_may_not_be_read_the_group_carries_it(path: Path) -> None:
    answers = run_ranks(3, _load_hidden, path, True)
    assert [works for _, works in answers] == [True, False, False]
    assert 7 * LARGE <= sum(count for count, _ in answers) <= 7 * LARGE + 3 * 64 * 1024


def _load_on_two_hosts(path: Path, share_reads: bool | None) -> int:
    host = f"host {dist.get_rank() % 2}"
    neighbours._host = lambda: host
    return _load(path, share_reads)


@pytest.mark.parametrize("share_reads", [True, slow(None)])
def test_hosts_send_to_each_other_and_ranks_copy_within(
    path: Path, share_reads: bool | None
) -> None:
    counts = run_ranks(4, _load_on_two_hosts, path, share_reads)
    most = 7 * LARGE if share_reads else 2 * 6 * LARGE + 4 * LARGE
    assert most <= sum(counts) <= most + 4 * 64 * 1024


def _load_with_failing_copies(path: Path, share_reads: bool | None) -> int:
    if dist.get_rank() == 1:
        original = Neighbours.copy
        calls = []

        def copy(self: Neighbours, copies: Any) -> None:
            calls.append(copies)
            if len(calls) == 3:  # after the probe and the tables
                raise OSError(errno.EFAULT, "injected")
            original(self, copies)

        Neighbours.copy = copy  # type: ignore[method-assign]
    return _load(path, share_reads)


@pytest.mark.parametrize("share_reads", [None, slow(True)])
def test_a_rank_that_cannot_copy_after_all_reads_for_itself(
    path: Path, share_reads: bool | None
) -> None:
    counts = run_ranks(2, _load_with_failing_copies, path, share_reads)
    assert counts[1] >= 6 * LARGE > counts[0]


# --- failures ---


def _load_damaged(path: Path) -> None:
    with pytest.raises(CorruptCheckpoint):
        _load(path, None)
    dist.barrier()  # all ranks got here


@pytest.mark.slow
def test_damage_that_one_rank_reads_fails_on_all(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run_ranks(3, _load_damaged, path)


_STEPS = [
    "pyckpt.LoadPlanner.finish_plan",
    "pyckpt.dcp.neighbours.Neighbours.hello",
    "pyckpt.dcp.sharing._nbytes",
    "pyckpt.dcp.neighbours.Neighbours.probe",
    "pyckpt.dcp.sharing.all_wanted",
    "pyckpt.dcp.sharing.bundles_of",
    "pyckpt.DirectReader.read_data",
    "pyckpt.dcp.sharing._Table",
    "pyckpt.dcp.sharing.Copy",
    "pyckpt.dcp.sharing._SharedLoad.read_again",
]


def _load_failing_at(path: Path, share_reads: bool | None) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("injected")

    for step in _STEPS:
        if share_reads and step.endswith("_nbytes"):
            continue
        for victim in range(dist.get_world_size()):
            failures: dict[int, str] = {}
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == victim:
                    patch.setattr(step, fails)
                try:
                    _load(path, share_reads)
                except LoadError as error:
                    failures = error.failures
            # No rank is blamed for an error that it only heard of.
            assert failures == {victim: "ValueError: injected"}, (step, victim)
            dist.barrier()
    _load(path, share_reads)


@pytest.mark.parametrize("share_reads", [None, slow(True)])
def test_an_error_of_one_rank_reaches_all(path: Path, share_reads: bool | None) -> None:
    """At any step; and the ranks can load afterwards."""
    run_ranks(2, _load_failing_at, path, share_reads)


def _load_dying(path: Path) -> None:
    if dist.get_rank() == 1:

        def dies(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        sharing._SharedLoad.table = dies  # type: ignore[assignment, method-assign]
    _load(path, None)


def test_a_rank_that_dies_in_the_middle_fails_the_others(path: Path) -> None:
    """At once: gloo sees that its connection is gone."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, _load_dying, path)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert "died" in str(caught.value.failures[1])


# --- finding each other ---


def _two() -> tuple[Neighbours, Neighbours]:
    first, second = (Neighbours(rank, default_engine) for rank in range(2))
    hellos = [first.hello(), second.hello()]
    first.hear(hellos)
    second.hear(hellos)
    return first, second


def test_a_process_that_answers_otherwise_is_no_neighbour() -> None:
    """Another container may have one of the same number."""
    first, second = _two()
    assert len(second.hello()) == HELLO
    assert first.is_near(1)
    assert not first.probe([0, 1])  # the second has said something else since
    assert second.probe([0, 1])


def test_one_failed_probe_is_that_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = []
    for rank, host in enumerate("abab"):
        monkeypatch.setattr(neighbours, "_host", lambda host=host: host)
        ones.append((one := Neighbours(rank, default_engine), one.hello()))
    first, _ = ones[0]
    first.hear([hello for _, hello in ones])
    assert [first.is_near(rank) for rank in range(4)] == [True, False, True, False]
    assert first.agree([True] * 4) == [0, 1, 0, 1]
    assert first.agree([True, True, False, True]) == [0, 1, 2, 1]


def test_processes_without_a_common_kernel_are_strangers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert neighbours._host() == neighbours._host()
    monkeypatch.setattr(neighbours, "_BOOT", tmp_path / "absent")
    assert neighbours._host() != neighbours._host()


@pytest.mark.parametrize(("scope", "expected"), [("0", []), ("1", [True, False]), (None, [])])
def test_others_are_let_in_while_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str | None, expected: list[bool]
) -> None:
    """Where the kernel asks for that."""
    rule = tmp_path / "ptrace_scope"
    if scope is not None:
        rule.write_text(f"{scope}\n")
    said: list[bool] = []

    def let(allowed: bool) -> bool:
        said.append(allowed)
        return True

    monkeypatch.setattr(neighbours, "_YAMA", rule)
    monkeypatch.setattr("pyckpt._C.let_peers_read", let)
    with Neighbours(0, default_engine) as one:
        one.hello()
        assert said == expected[:1]
    assert said == expected


def test_no_memory_is_given_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    first, second = _two()
    second._nonce = None
    hellos = [*first._heard]
    hellos[1] = [*hellos[1][:3], 4096, *hellos[1][4:]]
    first.hear(hellos)
    with caplog.at_level(logging.DEBUG, "pyckpt"):
        assert not first.probe([1])
    assert "process_vm_readv" in caplog.text
