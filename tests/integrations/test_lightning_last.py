"""The last checkpoint after a kill, removals that wait, modules without a Trainer, and files of
Lightning's own format."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from _lightning import BATCHES, Module, Stop, Validated, same, trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy as StockStrategy

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy, to_lightning

HERE = Path(__file__).parent


def fit(root: Path, *callbacks: Any, epochs: int = 1, **options: Any) -> Module:
    module = Module()
    path = options.pop("ckpt_path", None)
    options.setdefault("strategy", SingleDeviceStrategy("cpu"))
    trainer(root, *callbacks, epochs=epochs, **options).fit(module, ckpt_path=path)
    return module


def saves(root: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"dirpath": root / "c", "filename": "{epoch}", **options})


def leaves(value: Any) -> Any:
    """With lists of numbers for tensors, which can be compared."""
    if isinstance(value, dict):
        return {key: leaves(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return list(map(leaves, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def unfinished(path: Path) -> None:
    """What a save leaves that is killed before it is committed."""
    path.mkdir(parents=True, exist_ok=True)
    (path / ".saving").touch()
    (path / "__0_begun.distcp").write_bytes(b"a part")
    later = time.time() + 60
    os.utime(path, (later, later))  # Lightning takes the newest


def test_a_last_checkpoint_whose_save_was_killed_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = fit(tmp_path, epochs=2)
    fit(tmp_path, saves(tmp_path, save_last=True))
    unfinished(tmp_path / "c/last-v1.ckpt")
    again = fit(tmp_path, saves(tmp_path, save_last=True), epochs=2, ckpt_path="last")
    assert min(again.losses) == BATCHES + 1
    assert same(again, whole)
    assert "last-v1.ckpt holds no complete checkpoint" in caplog.text


def test_a_link_to_a_checkpoint_whose_save_was_killed_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, saves(tmp_path, save_last="link"))
    unfinished(tmp_path / "c/epoch=1.ckpt")
    (tmp_path / "c/last.ckpt").unlink()
    (tmp_path / "c/last.ckpt").symlink_to(tmp_path / "c/epoch=1.ckpt")
    again = fit(tmp_path, saves(tmp_path, save_last="link"), epochs=2, ckpt_path="last")
    assert min(again.losses) == BATCHES + 1


def test_a_run_whose_first_save_was_killed_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unfinished(tmp_path / "c/last.ckpt")
    with pytest.raises(LoadError, match="did not finish"):
        trainer(tmp_path, saves(tmp_path), strategy=SingleDeviceStrategy("cpu")).validate(
            Validated(), ckpt_path=str(tmp_path / "c/last.ckpt")
        )
    module = fit(tmp_path, saves(tmp_path, save_last=True), ckpt_path="last")
    assert min(module.losses) == 1
    assert "training begins anew" in caplog.text
    again = fit(tmp_path, saves(tmp_path, save_last=True), epochs=2, ckpt_path="last")
    assert min(again.losses) == BATCHES + 1


@pytest.mark.slow
@pytest.mark.parametrize(("rename", "first"), [(1, 1), (2, BATCHES + 1), (4, BATCHES + 1)])
def test_a_run_that_is_killed_at_a_commit_goes_on_by_the_same_command(
    tmp_path: Path, rename: int, first: int
) -> None:
    """Each epoch commits a checkpoint, and then the last one."""
    script = f"""
        import sys
        sys.path[:0] = {[str(HERE), str(HERE.parent / "helpers")]!r}
        from pathlib import Path
        from test_lightning_last import fit, saves
        root = Path(sys.argv[1])
        module = fit(root, saves(root, save_last=True), epochs=3, ckpt_path="last")
        print("from", min(module.losses))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(tmp_path)]
    inject = f"inject=rename,renameat,renameat2:signal=SIGKILL:when={rename}"
    trace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, "-e", inject]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # which renames, too
    killed = subprocess.run([*trace, *command], capture_output=True, text=True, env=environment)
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.split()[-2:] == ["from", str(first)]


def test_the_newest_beside_is_the_one_of_the_latest_step(tmp_path: Path) -> None:
    """Whatever was copied, exported or put there later; and no weights alone."""
    (tmp_path / "c").mkdir()
    for epochs in (1, 2):
        fit(tmp_path / f"{epochs}", saves(tmp_path / f"{epochs}"), epochs=epochs)
        shutil.copytree(
            tmp_path / f"{epochs}/c/epoch={epochs - 1}.ckpt", tmp_path / f"c/{epochs}.ckpt"
        )
    third = ModelCheckpoint(tmp_path / "3", filename="weights", save_weights_only=True)
    fit(tmp_path / "3", third, epochs=3)
    shutil.copytree(tmp_path / "3/weights.ckpt", tmp_path / "c/weights.ckpt")
    pyckpt.save({"other": torch.ones(1)}, tmp_path / "c/other.ckpt")
    to_lightning(tmp_path / "c/1.ckpt", tmp_path / "c/export.ckpt")
    torch.save(Module().state_dict(), tmp_path / "c/state.ckpt")
    later = time.time() + 50
    os.utime(tmp_path / "c/1.ckpt/.metadata", (later, later))
    unfinished(tmp_path / "c/last.ckpt")

    path = str(tmp_path / "c/last.ckpt")
    callbacks = [saves(tmp_path, save_top_k=0)]  # whose directory it is
    module = fit(tmp_path, *callbacks, epochs=3, ckpt_path=path)
    assert min(module.losses) == 2 * BATCHES + 1
    shutil.rmtree(tmp_path / "c/1.ckpt")
    shutil.rmtree(tmp_path / "c/2.ckpt")
    module = fit(tmp_path, *callbacks, epochs=3, ckpt_path=path)
    assert min(module.losses) == BATCHES + 1  # the export, which is not the newest file


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["latest", "checkpoint"], "other files"),
        (["__0_begun.distcp", "mine"], "no .metadata"),
        (["__0_begun.distcp"], "no .metadata"),
        ([".saving", "__0_begun.distcp", "mine"], "other files"),
    ],
)
def test_a_directory_that_no_killed_save_has_left_is_refused(
    tmp_path: Path, names: list[str], message: str
) -> None:
    fit(tmp_path, saves(tmp_path))
    (tmp_path / "c/last.ckpt").mkdir()
    for name in names:
        (tmp_path / "c/last.ckpt" / name).touch()
    with pytest.raises(LoadError, match=message):
        fit(tmp_path, saves(tmp_path, save_last=True), epochs=2, ckpt_path="last")


@pytest.mark.parametrize("names", [[], [".metadata.removed"]])
def test_what_a_kill_at_the_beginning_or_in_a_removal_leaves_is_passed_over(
    tmp_path: Path, names: list[str]
) -> None:
    fit(tmp_path, saves(tmp_path))
    (tmp_path / "c/last.ckpt").mkdir()
    for name in names:
        (tmp_path / "c/last.ckpt" / name).touch()
    again = fit(tmp_path, saves(tmp_path, save_last=True), epochs=2, ckpt_path="last")
    assert min(again.losses) == BATCHES + 1


def test_an_empty_directory_that_a_killed_save_has_left_does_not_take_a_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "c/epoch=0.ckpt").mkdir(parents=True)
    fit(tmp_path, saves(tmp_path))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["epoch=0.ckpt"]


def test_what_is_not_the_last_is_not_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, saves(tmp_path))
    unfinished(tmp_path / "c/epoch=1.ckpt")
    with pytest.raises(LoadError, match="did not finish"):
        fit(tmp_path, saves(tmp_path), ckpt_path=str(tmp_path / "c/epoch=1.ckpt"))


def test_a_file_of_lightnings_own_stays_until_the_save_after_it_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, saves(tmp_path), strategy=StockStrategy("cpu"))
    shutil.copy(tmp_path / "c/epoch=0.ckpt", tmp_path / "begin.ckpt")
    (tmp_path / "c/epoch=1.ckpt/.metadata").mkdir(parents=True)  # the commit will fail
    options: dict[str, Any] = {"enable_version_counter": False}
    with pytest.raises(OSError, match=r"epoch=1\.ckpt"):
        fit(
            tmp_path,
            saves(tmp_path, **options),
            epochs=2,
            ckpt_path=str(tmp_path / "begin.ckpt"),
        )
    assert (tmp_path / "c/epoch=0.ckpt").is_file()
    shutil.rmtree(tmp_path / "c/epoch=1.ckpt")
    fit(tmp_path, saves(tmp_path, **options), epochs=2, ckpt_path=str(tmp_path / "begin.ckpt"))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["epoch=1.ckpt"]


def test_the_directory_of_a_save_is_there_at_once(tmp_path: Path) -> None:
    """ModelCheckpoint links to it, and counts names that are there."""
    seen = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                go_on = threading.Event()
                trainer.strategy._open()._saver._thread.submit(go_on.wait)
                trainer.save_checkpoint(tmp_path / "new/a")
                seen.append((tmp_path / "new/a").is_dir())
                go_on.set()

    fit(tmp_path, Saves(), saves(tmp_path))
    assert seen == [True]


def test_a_module_without_a_trainer_is_saved_and_loaded(tmp_path: Path) -> None:
    module = Module()
    run = trainer(tmp_path, strategy=SingleDeviceStrategy("cpu"))
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "a")
    assert torch.equal(pyckpt.load(tmp_path / "a")["model"]["layers.0.bias"], module.layers[0].bias)
    loaded = trainer(tmp_path, strategy=SingleDeviceStrategy("cpu")).strategy.load_checkpoint(
        tmp_path / "a"
    )
    assert torch.equal(loaded["state_dict"]["layers.0.bias"], module.layers[0].bias)


def test_a_checkpoint_becomes_the_file_that_lightning_would_have_written(tmp_path: Path) -> None:
    fit(tmp_path / "a", saves(tmp_path / "a"), strategy=StockStrategy("cpu"))
    module = fit(tmp_path / "b", saves(tmp_path / "b"))
    file = tmp_path / "b.ckpt"
    to_lightning(tmp_path / "b/c/epoch=0.ckpt", file)
    theirs = torch.load(tmp_path / "a/c/epoch=0.ckpt", weights_only=False)
    mine = torch.load(file, weights_only=True)
    for one in (mine, theirs):
        del one["callbacks"]  # has the paths
        del one["loops"]["fit_loop"]["state_dict"]["combined_loader"]  # has generators
    assert leaves(mine) == leaves(theirs)
    assert same(Module.load_from_checkpoint(file), module)
    again = fit(tmp_path, epochs=2, strategy=StockStrategy("cpu"), ckpt_path=str(file))
    assert sorted(again.losses) == list(range(BATCHES + 1, 2 * BATCHES + 1))
    pyckpt.save({"other": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(LoadError, match="no checkpoint of a Trainer"):
        to_lightning(tmp_path / "other", file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no regular file"):
        to_lightning(tmp_path / "b/c/epoch=0.ckpt", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_shards_of_lightnings_own_are_refused_with_the_command_to_convert_them(
    tmp_path: Path,
) -> None:
    shards = tmp_path / "shards.ckpt"
    shards.mkdir()
    (shards / "meta.pt").touch()
    with pytest.raises(LoadError, match=rf"by: pyckpt import {shards} RUN"):
        fit(tmp_path, ckpt_path=str(shards))


@pytest.mark.parametrize("stop", [3, 5])
def test_a_run_that_accumulates_gradients_goes_on(tmp_path: Path, stop: int) -> None:
    """Within an epoch of five batches, of which each second one makes a step, and the last."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "epochs": 3}

    class Stops(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == stop + 1:
                raise Stop

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "a", every_steps=1, when_busy="wait")

    whole = fit(tmp_path, **options)
    with pytest.raises(Stop):
        fit(tmp_path, checkpoints(), Stops(), **options)
    again = fit(tmp_path, checkpoints(), **options)
    assert same(again, whole)
    assert again.losses.items() <= whole.losses.items()


def test_two_that_save_keep_what_each_of_them_keeps(tmp_path: Path) -> None:
    steps = ModelCheckpoint(tmp_path / "c", filename="s{step}", every_n_train_steps=2, save_top_k=1)
    module = fit(tmp_path, steps, saves(tmp_path, save_top_k=-1), epochs=2)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt", f"sstep={2 * BATCHES}.ckpt"]
    again = fit(
        tmp_path,
        epochs=3,
        ckpt_path=str(tmp_path / "c/epoch=1.ckpt"),
    )
    assert sorted(again.losses) == list(range(2 * BATCHES + 1, 3 * BATCHES + 1))
    assert sorted(module.losses) == list(range(1, 2 * BATCHES + 1))


@pytest.mark.parametrize("least", [{"min_epochs": 3}, {"min_steps": 3 * BATCHES}])
def test_a_signal_stops_a_run_that_should_train_longer(
    tmp_path: Path, least: dict[str, int]
) -> None:
    class Signal(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    module = Module()
    run = trainer(
        tmp_path, Signal(), Checkpoints(tmp_path / "a", on_signals="SIGTERM"), epochs=4, **least
    )
    run.fit(module)
    assert run.global_step == 2
    (path,) = (tmp_path / "a").glob("step-*")
    assert path.name == "step-00000002"
    # A later fit of the same Trainer has its limits again.
    assert run.fit_loop.min_epochs == least.get("min_epochs", 1)
    assert run.fit_loop.min_steps == least.get("min_steps")
