"""What other programs saved, as a step that a Checkpointer restores."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import run_child
from _sampling import slow
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import pyckpt
from pyckpt import Checkpointer
from pyckpt.convert import import_checkpoint
from pyckpt.errors import CorruptCheckpoint, LoadError, UnsafeCheckpoint


class Job:
    """A model, its optimizer and its scheduler, that learn."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def step(self, number: int) -> float:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def to(self, last: int, first: int = 1) -> list[float]:
        return [self.step(number) for number in range(first, last + 1)]

    def state_dicts(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.state.items()}


def resumed(directory: Path, last: int, **options: Any) -> list[float]:
    """The losses of a new job that goes on from a directory's newest checkpoint."""
    job = Job(seed=1)
    with Checkpointer(directory, **options) as checkpointer:
        start = checkpointer.restore(job.state, required=True)
    assert start is not None
    return job.to(last, start + 1)


# --- files of torch.save --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        {"model": "model", "optimizer": "optimizer", "scheduler": "scheduler"},
        {
            "model": "model_state_dict",
            "optimizer": "optimizer_state_dict",
            "scheduler": "lr_scheduler",
        },
    ],
)
@pytest.mark.parametrize("zipped", [True, slow(False)])
def test_a_loop_goes_on_from_its_file(names: dict[str, str], zipped: bool, tmp_path: Path) -> None:
    job = Job()
    job.to(3)
    saved = {names[name]: one for name, one in job.state_dicts().items()}
    torch.save({**saved, "step": 3}, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert (report.step, report.kind) == (3, "a file of torch.save")
    assert {"model", "optimizer", "scheduler", "step"} == set(report.names)
    assert resumed(tmp_path / "run", 6) == job.to(6, 4)


def test_a_file_that_does_not_tell_its_step(tmp_path: Path) -> None:
    job = Job()
    job.to(1)
    torch.save(job.state_dicts(), tmp_path / "old.pt")
    with pytest.raises(ValueError, match="--step"):
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert import_checkpoint(tmp_path / "old.pt", tmp_path / "run", step=7).step == 7
    with pytest.raises(FileExistsError):
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run", step=7)
    import_checkpoint(tmp_path / "old.pt", tmp_path / "run", step=7, overwrite=True)


def test_weights_of_ddp_lose_its_prefix(tmp_path: Path) -> None:
    job = Job()
    weights = {f"module.{name}": one for name, one in job.model.state_dict().items()}
    torch.save(weights, tmp_path / "old.pt")
    assert import_checkpoint(tmp_path / "old.pt", tmp_path / "run").step == 0
    other = Job(seed=1)
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore({"model": other.model}) == 0
    assert torch.equal(other.model[0].weight, job.model[0].weight)


@pytest.mark.parametrize("wrapped", ["both", "optimizer"])
@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."]
)
def test_names_of_wrappers(prefix: str, wrapped: str, tmp_path: Path) -> None:
    job = Job()
    names = [(prefix + name, one) for name, one in job.model.named_parameters()]
    job.optimizer = torch.optim.AdamW(names)
    job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    job.to(2)
    of_model = prefix if wrapped == "both" else ""
    weights = {of_model + name: one for name, one in job.model.state_dict().items()}
    saved = {"model": weights, "optimizer": job.optimizer.state_dict(), "step": 2}
    torch.save(saved, tmp_path / "old.pt")
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert ("module." in of_model) == any("all names began with" in one for one in report.notes)
    other = Job(seed=1)
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore({"model": other.model, "optimizer": other.optimizer}) == 2
    assert torch.equal(other.model[0].weight, job.model[0].weight)
    found, wanted = (one.optimizer.state_dict()["state"] for one in (other, job))
    for number, state in wanted.items():
        assert torch.equal(found[number]["exp_avg"], state["exp_avg"])


def test_steps_that_are_tensors(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2)}
    torch.save({"model": weights, "step": torch.tensor(5)}, tmp_path / "old.pt")
    assert import_checkpoint(tmp_path / "old.pt", tmp_path / "nested").step == 5
    for step in (torch.tensor(5), 5):
        mixed = {**weights, "c": torch.ones(1), "step": step, "epoch": 3}
        torch.save(mixed, tmp_path / "old.pt")
        report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run", overwrite=True)
        assert (report.step, {*report.names}) == (5, {"model", "epoch", "step"})
        assert any("no part of the model" in one for one in report.notes)
        assert {*pyckpt.load(report.path)["model"]} == {"a", "b", "c"}
    # A module may have such a buffer.
    torch.save({**weights, "step": torch.tensor(5)}, tmp_path / "old.pt")
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "buffer")
    assert (report.step, report.names) == (0, ["model"])
    assert any("'step' is a tensor among the weights" in one for one in report.notes)
    assert {*pyckpt.load(report.path)["model"]} == {"a", "b", "step"}


def test_an_adapter_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 5}')
    torch.save({"base_model.model.a.ia3_l": torch.ones(2)}, tmp_path / "adapter_model.bin")
    for config, error in (('{"peft_type": "IA3"}', LoadError), ("[]", CorruptCheckpoint)):
        (tmp_path / "adapter_config.json").write_text(config)
        with pytest.raises(error, match=r"resume_from_checkpoint|not readable"):
            import_checkpoint(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parameters_get_names_by_order(tmp_path: Path) -> None:
    job = Job()
    job.to(2)
    torch.save({**job.state_dicts(), "step": 2}, tmp_path / "old.pt")
    plain = import_checkpoint(tmp_path / "old.pt", tmp_path / "numbers")
    assert any("numbers" in one for one in plain.notes)
    named = import_checkpoint(tmp_path / "old.pt", tmp_path / "names", named_by_order=True)
    assert not named.notes
    saved = pyckpt.load(named.path)
    assert list(saved["optimizer"]["state"]) == [name for name, _ in job.model.named_parameters()]
    assert resumed(tmp_path / "names", 4) == job.to(4, 3)


def test_the_order_of_a_files_entries_does_not_matter(tmp_path: Path) -> None:
    job = Job()
    job.to(1)
    saved = {"step": 1, **dict(reversed(job.state_dicts().items()))}
    torch.save(saved, tmp_path / "old.pt")
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run", named_by_order=True)
    assert not report.notes
    names = [name for name, _ in job.model.named_parameters()]
    assert list(pyckpt.load(report.path)["optimizer"]["state"]) == names


@pytest.mark.parametrize(
    "saved",
    [
        {"pytorch-lightning_version": "2", "state_dict": 5},
        {"pytorch-lightning_version": "2", "state_dict": {}, "optimizer_states": [{}]},
        {"pytorch-lightning_version": "2", "state_dict": {}, "global_step": "9"},
        {
            "model": {"w": torch.ones(1)},
            "optimizer": {"state": {}, "param_groups": [{"params": 5}]},
        },
    ],
)
def test_malformed_entries(saved: dict[str, Any], tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "old.pt")
    with pytest.raises(LoadError, match=r"old\.pt cannot be read as"):
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_that_the_order_does_not_tell_are_not_guessed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)  # which of the three has no state cannot be seen
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(saved, tmp_path / "old.pt")
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run", named_by_order=True)
    assert any("does not tell" in one for one in report.notes)
    assert list(pyckpt.load(report.path)["optimizer"]["state"]) == [0, 1, 2, 3]


class Config:
    """A class of the program's own."""

    width = 3


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_file_runs(zipped: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    saved = {"model": {"w": torch.ones(2)}, "step": 1, "extra": Evil(mark)}
    torch.save(saved, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpoint, match="cod"):
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(saved))
    with pytest.raises(UnsafeCheckpoint, match="cod"):
        import_checkpoint(tmp_path / "plain.pkl", tmp_path / "run")
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_objects_are_left_out_on_request(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "step": 1, "config": Config(), "list": [1, Config()]}
    torch.save(saved, tmp_path / "old.pt")
    with pytest.raises(UnsafeCheckpoint, match=r"config \(.*Config\).*--leave-out") as raised:
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert len(raised.value.refused) == 1
    report = import_checkpoint(tmp_path / "old.pt", tmp_path / "run", leave_out=True)
    assert set(report.names) == {"model", "step"}
    assert len([one for one in report.notes if "left out" in one]) == 2


@pytest.mark.parametrize(
    "what", ["truncated", "garbage", "empty", "growing", "compressed", "circle", "doubling"]
)
def test_damaged_and_hostile_files(what: str, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"model": {"w": torch.ones(10_000)}, "step": 1}, path)
    data = path.read_bytes()
    if what == "truncated":
        path.write_bytes(data[:-100])
    elif what == "garbage":
        path.write_bytes(data[:100] + os.urandom(1000))
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "growing":
        torch.save({"model": {"w": torch.ones(1).expand(1 << 40)}, "step": 1}, path)
    elif what == "circle":
        circle: list[Any] = []
        circle.append(circle)
        torch.save({"model": {"w": torch.ones(1)}, "step": 1, "circle": circle}, path)
    elif what == "doubling":
        one: list[Any] = []
        for _ in range(60):
            one = [one, one]
        torch.save({"model": {"w": torch.ones(1)}, "step": 1, "one": one}, path)
    else:
        with zipfile.ZipFile(path) as old:
            records = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, record in records.items():
                new.writestr(name, record)
    with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint)):
        import_checkpoint(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arrays_of_numpy_come_without_its_code(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    table = numpy.arange(6, dtype="f4").reshape(2, 3)
    saved = {
        "model": {"w": torch.ones(2)},
        "table": table,
        "columns": numpy.asfortranarray(table),
        "rng": numpy.random.get_state(),
        "loss": numpy.float64(1.5),
        "step": 1,
    }
    torch.save(saved, tmp_path / "old.pt")
    loaded = pyckpt.load(import_checkpoint(tmp_path / "old.pt", tmp_path / "run").path)
    assert numpy.array_equal(loaded["table"], table)
    assert numpy.array_equal(loaded["columns"], table)
    assert numpy.array_equal(loaded["rng"][1], saved["rng"][1])
    assert loaded["loss"] == 1.5


# --- safetensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_size", ["5GB", 100])
def test_exports_come_back(max_shard_size: Any, tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, job.state)
        checkpointer.wait()
        checkpointer.export(tmp_path / "hf", max_shard_size=max_shard_size)
    report = import_checkpoint(tmp_path / "hf", tmp_path / "back", step=5)
    assert (report.kind, report.path.name) == ("weights", "step-00000005")
    other = Job(seed=1)
    with Checkpointer(tmp_path / "back") as checkpointer:
        checkpointer.restore({"model": other.model}, required=True)
    for name, one in job.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], one), name


def safetensors(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}},
        {"w": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
        {"w": {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}},
        {"w": {"shape": [4], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}},
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        },
        {"after a hole": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
        {"before a rest": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"w": []},
        [],
        b"{",
        b"[" * 100_000,
    ],
)
def test_hostile_safetensors(header: Any, tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(CorruptCheckpoint):
        import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run")


def test_an_index_leads_to_no_other_place(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    safetensors(tmp_path / "secret.safetensors", header, bytes(16))
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match="names the file"):
        import_checkpoint(tmp_path / "hf", tmp_path / "run")


def test_tensors_that_are_not_aligned(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    values = torch.tensor([1.5, -2.0])
    safetensors(
        tmp_path / "m.safetensors", header, b"\7" + bytes(values.view(torch.uint8).tolist())
    )
    loaded = pyckpt.load(import_checkpoint(tmp_path / "m.safetensors", tmp_path / "run").path)
    assert torch.equal(loaded["model"]["w"], values)


# --- DCP ------------------------------------------------------------------------------------------


def test_a_stock_checkpoint(tmp_path: Path) -> None:
    job = Job()
    job.to(2)
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optim": optimizer, "scheduler": job.scheduler.state_dict(), "step": 2}
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    report = import_checkpoint(tmp_path / "stock", tmp_path / "run")
    assert (report.step, report.kind) == (2, "a DCP checkpoint")
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000002"]
    assert resumed(tmp_path / "run", 5) == job.to(5, 3)


def test_weights_alone_in_a_stock_checkpoint(tmp_path: Path) -> None:
    job = Job()
    dcp.save(job.model.state_dict(), checkpoint_id=tmp_path / "weights")
    report = import_checkpoint(tmp_path / "weights", tmp_path / "run")
    assert (report.names, report.step) == (["model"], 0)


def test_a_checkpoint_of_pyckpt_keeps_its_step(tmp_path: Path) -> None:
    job = Job()
    job.to(4)
    with Checkpointer(tmp_path / "a", naming="checkpoint-{}") as checkpointer:
        checkpointer.save(4, {**job.state, "rng": pyckpt.RngState()})
    report = import_checkpoint(tmp_path / "a" / "checkpoint-4", tmp_path / "b")
    assert report.step == 4
    assert resumed(tmp_path / "b", 6) == job.to(6, 5)


def test_a_damaged_one_is_not_imported(tmp_path: Path) -> None:
    pyckpt.save({"model": {"w": torch.ones(10_000)}}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[20_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        import_checkpoint(tmp_path / "a", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_torchtitans_layout(tmp_path: Path) -> None:
    """As its manager saves it: the model at the top, the optimizer flat, the step in a tensor."""
    job = Job()
    job.to(3)
    names = [name for name, _ in job.model.named_parameters()]
    saved = job.optimizer.state_dict()
    flat: dict[str, Any] = {}
    for number, name in enumerate(names):
        flat |= {f"state.{name}.{key}": one for key, one in saved["state"][number].items()}
        options = {k: v for k, v in saved["param_groups"][0].items() if k != "params"}
        flat |= {f"param_groups.{name}.{key}": one for key, one in options.items()}
    state = {
        **job.model.state_dict(),
        "optimizer": flat,
        "lr_scheduler": job.scheduler.state_dict(),
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(99)},
        "dataloader": {"dp_rank_0": b"pickled"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "outputs" / "step-3")
    with pytest.raises(LoadError, match="step-3"):
        import_checkpoint(tmp_path / "outputs", tmp_path / "run")
    report = import_checkpoint(tmp_path / "outputs" / "step-3", tmp_path / "run")
    assert (report.step, report.kind) == (3, "a checkpoint of torchtitan")
    assert resumed(tmp_path / "run", 5) == job.to(5, 4)


def test_the_directories_of_lightnings_sharded_strategies(tmp_path: Path) -> None:
    job = Job()
    job.to(2)
    model, optimizer = get_state_dict(job.model, job.optimizer)
    path = tmp_path / "epoch=0-step=2.ckpt"
    dcp.save({"model": model, "optimizer_0": optimizer}, checkpoint_id=path)
    rest = {"global_step": 2, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
    torch.save({**rest, "lr_schedulers": [job.scheduler.state_dict()]}, path / "meta.pt")
    report = import_checkpoint(path, tmp_path / "run")
    assert (report.step, report.kind) == (2, "a sharded checkpoint of Lightning")
    other = Job(seed=1)
    state = {"model": other.model, "optimizer_0": other.optimizer, "lightning": {}}
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(state) == 2
    other.scheduler.load_state_dict(state["lightning"]["lr_schedulers"][0])
    assert other.to(4, 3) == job.to(4, 3)


def test_more_than_ten_optimizers_of_lightnings_sharded_strategies(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    group = {"lr": 0.1, "params": ["w"]}
    optimizers = {
        f"optimizer_{i}": {"state": {"w": {"x": torch.tensor(i)}}, "param_groups": [group]}
        for i in range(11)
    }
    dcp.save({"model": {"w": torch.ones(2)}, **optimizers}, checkpoint_id=path)
    torch.save({"global_step": 2, "pytorch-lightning_version": "2.6.6"}, path / "meta.pt")
    state = pyckpt.load(import_checkpoint(path, tmp_path / "run").path)
    for name, saved in optimizers.items():
        assert state[name]["state"]["w"]["x"] == saved["state"]["w"]["x"], name


def test_each_ranks_generators(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    torch.save(Job().optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    states = []
    for rank in range(2):
        torch.manual_seed(rank)
        states.append(torch.get_rng_state())
        torch.save({"cpu": states[-1], "xla": 3}, folder / f"rng_state_{rank}.pth")
    report = import_checkpoint(folder, tmp_path / "run")
    assert any("'xla'" in one for one in report.notes)
    rng = pyckpt.load(report.path)["rng"]
    assert list(rng) == ["rank-00000-of-00002", "rank-00001-of-00002"]
    for own, state in zip(rng.values(), states, strict=True):
        assert torch.equal(own["torch"], state)


def test_all_files_of_accelerate_are_read_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_3"
    folder.mkdir()
    job = Job()
    job.to(1)
    torch.save(job.model.state_dict(), folder / "pytorch_model.bin")
    torch.save(job.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    for i in (*range(10), 11):
        torch.save({"v": i}, folder / f"custom_checkpoint_{i}.pkl")
    for name in ("sampler.bin", "dl_state_dict_1.bin", "scheduler_2.bin"):
        torch.save({}, folder / name)
    report = import_checkpoint(folder, tmp_path / "run")
    assert pyckpt.load(report.path)["custom_9"] == {"v": 9}
    assert [one for one in report.notes if one.endswith("is not read")] == [
        "custom_checkpoint_11.pkl is not read",
        "dl_state_dict_1.bin is not read",
        "sampler.bin is not read",
        "scheduler_2.bin is not read",
    ]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        import_checkpoint(tmp_path / "absent", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="no checkpoint that is known"):
        import_checkpoint(tmp_path / "empty", tmp_path / "run")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(LoadError, match="list"):
        import_checkpoint(tmp_path / "list.pt", tmp_path / "run")


# --- memory ---------------------------------------------------------------------------------------


def _anonymous(_pipe: Any, source: Path, target: Path) -> int:
    """The most memory of its own, besides pages of files, that an import takes."""
    import threading

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    import_checkpoint(source / "small.pt", target / "warm")
    before = most = now()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, now())

    thread = threading.Thread(target=watch)
    thread.start()
    import_checkpoint(source / "large", target / "run", step=1)
    over.set()
    thread.join()
    return most - before


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_memory_is_bounded(format: str, tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((25 << 18,), float(i)) for i in range(8)}  # 200 MiB
    torch.save({"w": torch.ones(8)}, tmp_path / "small.pt")
    if format == "torch":
        torch.save(weights, tmp_path / "large")
    else:
        dcp.save(weights, checkpoint_id=tmp_path / "large")
    assert run_child(_anonymous, tmp_path, tmp_path / "target") < 60 << 20


def test_a_tied_weight_that_safetensors_left_out(tmp_path: Path) -> None:
    """As transformers saves it: nothing in the file says what was tied."""

    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    values = torch.arange(6.0).view(3, 2)
    header = {"embed.weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}
    data = bytes(values.view(torch.uint8).flatten().tolist())
    safetensors(tmp_path / "model.safetensors", header, data)
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run")
    model = tied()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.restore({"model": model})
    assert torch.equal(model["head"].weight, values)
    model["head"].weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(LoadError, match=r"head\.weight"), Checkpointer(tmp_path / "run") as other:
        other.restore({"model": model})
