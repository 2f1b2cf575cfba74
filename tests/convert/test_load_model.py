"""The weights of a module, from wherever they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import Child, Pipe, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyckpt
from pyckpt import Checkpointer
from pyckpt.convert import load_model as load_model_module
from pyckpt.errors import CorruptCheckpoint, LoadError, RanksLost


def model_of(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two steps, whose models have the seeds 1 and 2."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            model = model_of(step)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    return tmp_path / "run"


def test_the_newest_of_a_run(run: Path) -> None:
    model = model_of(0)
    report = pyckpt.load_model(model, run)
    assert equal(model, model_of(2))
    assert sorted(report.loaded) == [f"model.{name}" for name in sorted(model.state_dict())]
    assert not report.not_verified
    assert not report.unexpected


def test_one_checkpoint(run: Path) -> None:
    model = model_of(0)
    pyckpt.load_model(model, run / "step-00000001")
    assert equal(model, model_of(1))


def test_a_corrupt_one_is_passed_over_in_a_run_alone(run: Path) -> None:
    (file,) = (run / "step-00000002").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(bytes(model_of(2)[0].weight.detach().numpy().tobytes()))] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        pyckpt.load_model(model_of(0), run / "step-00000002")
    model = model_of(0)
    pyckpt.load_model(model, run)
    assert equal(model, model_of(1))


def test_data_parallel(run: Path, tmp_path: Path) -> None:
    """`nn.DataParallel` is a wrapper like DDP, where it is saved, restored, exported and loaded."""
    model = nn.DataParallel(model_of(0))
    pyckpt.load_model(model, run)
    assert equal(model.module, model_of(2))
    with Checkpointer(tmp_path / "other") as checkpointer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        handle.wait()
        fresh = model_of(0)
        checkpointer.restore(
            {"model": fresh, "optimizer": torch.optim.SGD(fresh.parameters(), lr=0.1)}
        )
        assert equal(fresh, model_of(2))
    pyckpt.export(handle.path, tmp_path / "hf")
    for path in (handle.path, tmp_path / "hf"):
        inner = nn.Sequential(nn.DataParallel(model_of(0)[0]), model_of(0)[1])
        pyckpt.load_model(inner, path)
        assert equal(inner, model_of(2))


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("max_shard_size", ["5GB", 200])
def test_exports(run: Path, format: Any, max_shard_size: Any, tmp_path: Path) -> None:
    files = pyckpt.export(
        run / "step-00000002", tmp_path / "hf", format=format, max_shard_size=max_shard_size
    )
    for path in (tmp_path / "hf", files[-1]):
        model = model_of(0)
        report = pyckpt.load_model(model, path)
        assert equal(model, model_of(2))
        assert report.not_verified == report.loaded


def test_other_dtypes(run: Path, tmp_path: Path) -> None:
    pyckpt.export(run / "step-00000002", tmp_path / "hf", dtype=torch.bfloat16)
    model = model_of(0)
    report = pyckpt.load_model(model, tmp_path / "hf")
    assert equal(model, model_of(2).bfloat16().float())
    assert len(report.converted) == 4


def test_weights_without_a_name(tmp_path: Path) -> None:
    for stock, path in ((True, tmp_path / "a"), (False, tmp_path / "b")):
        if stock:
            dcp.save(model_of(1).state_dict(), checkpoint_id=path)
        else:
            pyckpt.save(model_of(1).state_dict(), path)
        model = model_of(0)
        pyckpt.load_model(model, path)
        assert equal(model, model_of(1))
        with pytest.raises(LoadError, match="another shape"):
            pyckpt.load_model(model_of(0, width=3), path)
        with pytest.raises(LoadError, match="on the meta device; materialize it first"):
            pyckpt.load_model(model.to("meta"), path)


def test_it_is_strict(run: Path, tmp_path: Path) -> None:
    pyckpt.export(run / "step-00000002", tmp_path / "hf")
    for path in (run, run / "step-00000002", tmp_path / "hf"):
        larger = nn.Sequential(*model_of(0), nn.Linear(4, 1))
        with pytest.raises(LoadError, match=r"2\.bias"):
            pyckpt.load_model(larger, path)
        before = larger[2].weight.detach().clone()
        report = pyckpt.load_model(larger, path, missing="keep")
        assert [name for name in report.kept if "2.weight" in name]
        assert torch.equal(larger[2].weight, before)
        assert torch.equal(larger[0].weight, model_of(2)[0].weight)
        smaller = nn.Sequential(model_of(0)[0])
        with pytest.raises(LoadError, match=r"1\.bias"):
            pyckpt.load_model(smaller, path)
        report = pyckpt.load_model(smaller, path, unexpected="ignore")
        assert len(report.unexpected) == 2
        other = model_of(0, width=3)
        with pytest.raises(LoadError):
            pyckpt.load_model(other, path)
        assert equal(other, model_of(0, width=3))


def test_names(run: Path, tmp_path: Path) -> None:
    pyckpt.export(run / "step-00000002", tmp_path / "hf")
    wrapped = nn.ModuleDict({"body": model_of(0)})
    pyckpt.load_model(wrapped, tmp_path / "hf", rename=lambda name: f"body.{name}")
    assert equal(wrapped["body"], model_of(2))
    with pytest.raises(LoadError, match="net"):
        pyckpt.load_model(model_of(0), run, key="net")


def test_names_that_rename_makes_one(tmp_path: Path) -> None:
    weights = {**model_of(1).state_dict(), "old.0.weight": torch.zeros(8, 4)}
    torch.save(weights, tmp_path / "weights.bin")
    pyckpt.save(weights, tmp_path / "bare")
    for path in (tmp_path / "weights.bin", tmp_path / "bare"):
        model = model_of(0)
        with pytest.raises(LoadError, match=r"one name.*0\.weight"):
            pyckpt.load_model(model, path, rename=lambda name: name.removeprefix("old."))
        assert equal(model, model_of(0))


def test_a_run_that_also_holds_an_export(run: Path) -> None:
    pyckpt.export(run / "step-00000001", run)
    model = model_of(0)
    pyckpt.load_model(model, run)
    assert equal(model, model_of(2))


def test_complex_weights_of_a_real_module(tmp_path: Path) -> None:
    torch.save({k: one * 1j for k, one in model_of(1).state_dict().items()}, tmp_path / "w.bin")
    model = model_of(0)
    with pytest.raises(LoadError, match="imaginary"):
        pyckpt.load_model(model, tmp_path / "w.bin")
    assert equal(model, model_of(0))


def test_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    one, other = tied(), tied()
    pyckpt.save({"model": one.state_dict()}, tmp_path / "c")
    pyckpt.export(tmp_path / "c", tmp_path / "hf", tied={"b.weight": "a.weight"})
    pyckpt.load_model(other, tmp_path / "hf")
    assert equal(one, other)


def test_views_that_only_begin_alike_are_not_tied(tmp_path: Path) -> None:
    model = nn.Module()
    memory = torch.arange(8.0)
    model.register_buffer("a", memory[:4])
    model.register_buffer("b", memory[::2])
    torch.save({"a": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"not there \(1\): b"):
        pyckpt.load_model(model, tmp_path)
    assert torch.equal(memory, torch.arange(8.0))


def test_what_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="load_model takes a module, not a dict"):
        pyckpt.load_model({"model": nn.Linear(1, 1)}, tmp_path)  # type: ignore[arg-type]


def test_a_checkpoint_that_lost_its_metadata(run: Path) -> None:
    directory = run / "step-00000001"
    (directory / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match=r"data files, and no \.metadata"):
        pyckpt.load_model(model_of(0), directory)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pyckpt.load_model(model_of(0), tmp_path / "absent")
    torch.save({"model": model_of(1).state_dict(), "step": 3}, tmp_path / "old.pt")
    with pytest.raises(LoadError, match="pyckpt import"):
        pyckpt.load_model(model_of(0), tmp_path / "old.pt")
    with pytest.raises(FileNotFoundError, match="no checkpoint to restore"):
        pyckpt.load_model(model_of(0), tmp_path)


def _load_where_one_cannot_look(run: Path) -> list[str]:
    rank = dist.get_rank()
    said = []
    for path in (run / "absent", "memory:///absent", run, run / "step-00000001"):
        mine = path
        if path in (run, run / "step-00000001") and rank == 1:
            mine = run / "absent"  # as where a file system is not mounted
        try:
            pyckpt.load_model(model_of(0), mine)
            said.append("loaded")
        except (OSError, LoadError) as error:
            said.append(type(error).__name__)
    there = f"memory:///{run.name}"  # the store of each process is its own
    if rank == 0:
        pyckpt.save({"model": model_of(1)}, there, no_dist=True)
    for path in (there, run if rank else run / "step-00000001"):
        try:
            pyckpt.load_model(model_of(0), path)
            said.append("loaded")
        except (OSError, LoadError) as error:
            said.append(type(error).__name__)
    model = model_of(0)
    pyckpt.load_model(model, run)
    assert equal(model, model_of(2))
    return said


def _load_where_one_dies(_: Pipe, store: str, path: Path, rank: int, where: str) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(load_model_module, where, die)
    with pytest.raises(RanksLost) as caught:
        pyckpt.load_model(nn.Linear(3, 2), path)
    return caught.value.ranks, str(caught.value).partition(":")[0]


@pytest.mark.parametrize("where", [pytest.param("_is_bare", marks=pytest.mark.slow), "load"])
def test_a_rank_that_dies_is_named(tmp_path: Path, where: str) -> None:
    pyckpt.save(dict(nn.Linear(3, 2).state_dict()), tmp_path / "bare")
    store = str(tmp_path / "store")
    children = [
        Child(_load_where_one_dies, store, tmp_path / "bare", rank, where) for rank in range(2)
    ]
    try:
        assert children[0].receive() == ((1,), "loading weights failed")
    finally:
        for child in children:
            child.kill()


def test_no_rank_waits_for_one_that_cannot_look(run: Path) -> None:
    absent, differ = "FileNotFoundError", "LoadError"
    expected = [absent, absent, absent, absent, absent, differ]
    assert run_ranks(2, _load_where_one_cannot_look, run) == [expected, expected]


def test_a_run_whose_checkpoints_have_other_names(run: Path) -> None:
    (run / "step-00000002").rename(run / "checkpoint-2")
    model = model_of(0)
    pyckpt.load_model(model, run, naming="checkpoint-{}")
    assert equal(model, model_of(2))


def _sharded(run: Path, export: Path) -> list[bool]:
    found = []
    for path in (run, run / "step-00000001", export):
        model = model_of(0)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        pyckpt.load_model(model, path)
        whole = model_of(1 if path.name == "step-00000001" else 2).state_dict()
        found += [
            torch.equal(one.full_tensor(), whole[name]) for name, one in model.state_dict().items()
        ]
    return found


@pytest.mark.slow
def test_sharded_modules(run: Path, tmp_path: Path) -> None:
    pyckpt.export(run / "step-00000002", tmp_path / "hf")
    for found in run_ranks(2, _sharded, run, tmp_path / "hf"):
        assert all(found)
        assert len(found) == 12


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."]
)
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_names_of_wrappers(kind: str, prefix: str, tmp_path: Path) -> None:
    weights = {prefix + name: one for name, one in model_of(1).state_dict().items()}
    path = tmp_path / "model.pt"
    if kind == "file":
        torch.save(weights, path)
    else:
        dcp.save(weights, checkpoint_id=path)
    model = model_of(0)
    report = pyckpt.load_model(model, path)
    assert equal(model, model_of(1))
    assert not report.unexpected


def test_a_submodule_that_is_called_as_ddps(tmp_path: Path) -> None:
    for prefix in ("", "module."):
        saved, model = (nn.ModuleDict({"module": model_of(seed)}) for seed in (1, 0))
        weights = {prefix + name: one for name, one in saved.state_dict().items()}
        torch.save(weights, tmp_path / "model.pt")
        dcp.save(weights, checkpoint_id=tmp_path / f"dcp{prefix}")
        for path in (tmp_path / "model.pt", tmp_path / f"dcp{prefix}"):
            model = nn.ModuleDict({"module": model_of(0)})
            pyckpt.load_model(model, path)
            assert equal(model, saved)


class Extra(nn.Linear):
    """With a state beside its tensors."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS = {
    "tensor": torch.arange(3.0),
    "longer": torch.arange(5.0),
    "plain": {"seen": 3, "names": ["a", "b"]},
    "mixed": {"scale": torch.ones(2), "k": [1, 2]},
    "none": None,
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", ["ours", "file", "bare", "bare by stock"])
def test_extra_states(kind: str, extra: str, tmp_path: Path) -> None:
    if (kind, extra) == ("ours", "longer"):
        pytest.skip("a checkpoint's tensors have the shape of those that they are loaded into")
    saved = nn.Sequential(Extra(EXTRAS[extra]), nn.Linear(2, 2))
    path = tmp_path / "model.pt"
    if kind == "ours":
        pyckpt.save({"model": saved}, path)
    elif kind == "file":
        torch.save(saved.state_dict(), path)
    elif kind == "bare":
        pyckpt.save(saved.state_dict(), path)
    else:
        dcp.save(saved.state_dict(), checkpoint_id=path)
    now = torch.zeros(3) if isinstance(EXTRAS[extra], torch.Tensor) else {"seen": 0}
    model = nn.Sequential(Extra(now), nn.Linear(2, 2))
    report = pyckpt.load_model(model, path)
    found: Any = model[0].extra
    assert str(found) == str(EXTRAS[extra])
    assert torch.equal(model[0].weight, saved[0].weight)  # type: ignore[arg-type]
    assert any("0._extra_state" in name for name in [*report.loaded, *report.filled])
    assert not report.kept


def test_extra_states_that_do_not_fit(tmp_path: Path) -> None:
    class Deaf(Extra):
        set_extra_state = nn.Module.set_extra_state

    class Picky(Extra):
        def set_extra_state(self, state: Any) -> None:
            raise ValueError("not mine")

    model = Extra(torch.ones(3))
    torch.save(model.state_dict(), tmp_path / "with.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "without.pt")
    with pytest.raises(LoadError, match="no set_extra_state"):
        pyckpt.load_model(Deaf(), tmp_path / "with.pt")
    with pytest.raises(LoadError, match="_extra_state was not taken: ValueError: not mine"):
        pyckpt.load_model(Picky(), tmp_path / "with.pt")
    with pytest.raises(LoadError, match="not in the module"):
        pyckpt.load_model(nn.Linear(2, 2), tmp_path / "with.pt")
    with pytest.raises(LoadError, match="not there"):
        pyckpt.load_model(model, tmp_path / "without.pt")
    for extra in (torch.ones(3), {"a": 1}):
        report = pyckpt.load_model(Extra(extra), tmp_path / "without.pt", missing="keep")
        assert report.kept == ["model._extra_state"]
    pyckpt.load_model(Extra({"a": 1}), tmp_path / "without.pt")
