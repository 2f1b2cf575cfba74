"""``export``, ``import`` and ``repair-optimizer``, as a user runs them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _cli import pyckpt as command
from _ranks import run_child
from torch import nn

import pyckpt
from pyckpt import Checkpointer
from pyckpt.printable import printable


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def _main(_pipe: Any, arguments: list[str]) -> Done:
    """The program's own entry point, in a child that has torch already."""
    from pyckpt.cli import main

    sys.argv = ["pyckpt", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def pyckpt_(*arguments: object) -> Done:
    done: Done = run_child(_main, [str(one) for one in arguments])
    return done


def told(*arguments: object) -> Any:
    done = pyckpt_(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.fixture
def run(model: nn.Module, tmp_path: Path) -> Path:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, {"model": model, "optimizer": optimizer})
    return tmp_path / "run"


def test_there_and_back(run: Path, model: nn.Module, tmp_path: Path) -> None:
    said = command("export", run, tmp_path / "hf", "--json").json
    assert [Path(name).name for name in said["files"]] == ["model.safetensors"]
    assert said["checkpoint"] == str(run / "step-00000007")
    back = command("import", tmp_path / "hf", tmp_path / "back", "--step", 9, "--json").json
    assert (back["step"], back["names"], back["kind"]) == (9, ["model"], "weights")
    other = nn.Linear(4, 3)
    pyckpt.load_model(other, back["path"])
    assert torch.equal(other.weight, model.weight)


@pytest.mark.slow
def test_all_formats(run: Path, model: nn.Module, tmp_path: Path) -> None:
    told("export", run, tmp_path / "dcp", "--format", "dcp")
    weights = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    dcp.load(weights, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(weights["weight"], model.weight)
    again = pyckpt_("export", run, tmp_path / "dcp", "--format", "dcp")
    assert again.returncode == 2
    assert "a checkpoint is there already" in again.stderr
    told("export", run, tmp_path / "dcp", "--format", "dcp", "--overwrite", "--all")
    assert set(pyckpt.load(tmp_path / "dcp")) == {"model", "optimizer"}
    told("export", run, tmp_path / "torch", "--format", "torch", "--dtype", "bfloat16")
    found = torch.load(tmp_path / "torch" / "pytorch_model.bin")
    assert torch.equal(found["weight"], model.weight.bfloat16())
    told("export", run, tmp_path / "all.pt", "--format", "torch", "--all")
    assert set(torch.load(tmp_path / "all.pt")) >= {"model", "optimizer"}
    for wrong in (["--all", "--key", "x"], ["--dtype", "int8"], ["--tied", "a"], ["--key", "x"]):
        done = pyckpt_("export", run, tmp_path / "wrong", *wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("pyckpt: ")
        assert len(done.stderr.splitlines()) == 1


def test_options_that_a_format_has_no_use_for_are_refused(run: Path, tmp_path: Path) -> None:
    for how in (["--format", "dcp"], ["--format", "torch", "--all"]):
        for more in (
            ["--dtype", "bfloat16"],
            ["--tied", "a=b"],
            ["--config", "c.json"],
            ["--max-shard-size", "1MB"],
        ):
            done = command("export", run, tmp_path / "out", *how, *more)
            assert done.status == 2
            assert more[0] in done.err
            assert not (tmp_path / "out").exists()


def test_a_key_that_is_not_there_is_told_by_the_names_of_options(run: Path, tmp_path: Path) -> None:
    for more, hint in (([], "--all exports all tensors"), (["--format", "torch"], "")):
        done = command("export", run, tmp_path / "out", "--key", "nope", *more)
        assert done.status == 2
        said = " ".join(done.err.split())
        assert "no tensors under 'nope'; its keys are ['model', 'optimizer'" in said
        assert hint in said
        assert "key=None" not in said


def test_an_export_names_its_own_files_and_replaces_none_unasked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "README").touch()
    done = command("export", run, tmp_path / "dcp", "--format", "dcp", "--json")
    names = [Path(name).name for name in done.json["files"]]
    assert len(names) == 2
    assert (names[0][:4], names[1]) == ("__0_", ".metadata")
    file = tmp_path / "all.pt"
    file.write_text("precious")
    done = command("export", run, file, "--format", "torch", "--all")
    assert done.status == 2
    assert "--overwrite" in done.err
    assert file.read_text() == "precious"
    assert command("export", run, file, "--format", "torch", "--all", "--overwrite").status == 0
    assert set(torch.load(file)) >= {"model", "optimizer"}


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "model.safetensors", "model.safetensors.index.json"],
)
def test_weights_of_others_are_not_replaced_unasked(run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / name).write_bytes(b"precious")
    done = command("export", run, out)
    assert done.status == 2
    assert name in done.err
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_bytes() == b"precious"
    assert command("export", run, out, "--overwrite", "--max-shard-size", "0.02KB").status == 0
    assert len([*out.iterdir()]) == 3
    assert command("export", run, out).status == 0  # its own files need no --overwrite
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_a_lost_metadata_file_is_said(run: Path, tmp_path: Path) -> None:
    (run / "step-00000007" / ".metadata").unlink()
    done = command("export", run / "step-00000007", tmp_path / "out")
    assert done.status == 2
    assert "bring it back" in done.err


@pytest.mark.slow
def test_as_a_program(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyckpt", "export", run, tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout


@pytest.mark.slow
def test_convert_is_import(model: nn.Module, tmp_path: Path) -> None:
    torch.save({"net": model.state_dict(), "global_step": 3}, tmp_path / "old.pt")
    said = pyckpt_("convert", tmp_path / "old.pt", tmp_path / "run")
    assert said.returncode == 0
    assert "step 3" in said.stdout
    assert (tmp_path / "run" / "step-00000003" / ".metadata").is_file()
    said = pyckpt_("import", tmp_path / "old.pt", tmp_path / "run", "--name", "net=body")
    assert said.returncode == 2  # the step is there
    assert "--overwrite" in pyckpt_("import", "--help").stdout


class Config:
    pass


def test_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "config\x1b[31m": Config()}, tmp_path / "old.pt")
    done = pyckpt_("import", tmp_path / "old.pt", tmp_path / "run")
    assert done.returncode == 2
    assert "--leave-out" in done.stderr
    assert "\x1b" not in done.stderr
    done = pyckpt_("import", tmp_path / "old.pt", tmp_path / "run", "--leave-out")
    assert done.returncode == 0
    assert "is left out" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_repair_optimizer(run: Path, tmp_path: Path) -> None:
    saved = pyckpt.load(run / "step-00000007")
    for entries in saved["optimizer"]["state"].values():
        entries["step"] = entries["step"].half()
    pyckpt.save(saved, tmp_path / "c")
    said = told("repair-optimizer", tmp_path / "c", "--dry-run")
    assert [one["found"] for one in said["repairs"]] == ["cpu float16"] * 2
    assert not said["written"]
    done = pyckpt_("repair-optimizer", tmp_path / "c")
    assert done.returncode == 0
    assert "2 put right" in done.stdout
    assert told("repair-optimizer", tmp_path / "c") == {"repairs": [], "written": False}


@pytest.mark.parametrize("how", [(), ("--format", "dcp"), ("--format", "torch", "--all")])
def test_a_part_of_a_checkpoint_is_not_exported(
    how: tuple[str, ...], nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    done = command("export", nodes[0], tmp_path / "out", *how)
    assert done.status == 2
    assert "1 of 2 files are on other nodes: export it from the mirror" in done.err


def test_long_and_undecodable_paths_are_printed_on_one_line(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(3)}})
    for name in ("a" * 230, os.fsdecode(b"caf\xe9")):
        out = tmp_path / name
        command_line = [sys.executable, "-m", "pyckpt", "export", tmp_path / "run", out]
        done = subprocess.run(command_line, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        (line,) = [line for line in done.stdout.decode().splitlines() if "safetensors" in line]
        assert printable(str(out / "model.safetensors")) in line
