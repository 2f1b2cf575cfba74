"""torchtitan's CheckpointManager on pyckpt: the same options, files and results."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer import (
    CheckpointManager as TitansCheckpointManager,
)
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

import pyckpt
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.integrations.torchtitan import CheckpointManager

HERE = Path(__file__).parent
MODES = ["disabled", "async", "async_with_pinned_mem"]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Data:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def next(self) -> torch.Tensor:
        self.at += 1
        return torch.full((4, 8), float(self.at)).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Job:
    """What torchtitan's Trainer does between and around the calls of its checkpointer."""

    def __init__(
        self,
        base: Path,
        manager: Any = CheckpointManager,
        width: int = 8,
        shard: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.step = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 2)
        )
        if shard:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        self.optimizers = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.data = Data()
        options = {"enable": True, "interval": 2, "last_save_model_only": False, **options}
        self.checkpointer = manager.Config(**options).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(base),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def run(self, to: int, last: int = 10**9) -> list[float]:
        losses = []
        while self.step < to:
            self.step += 1
            torch.manual_seed(self.step)  # torchtitan 0.3 does not save the state of the RNG
            loss = self.model(self.data.next()).square().sum()
            self.optimizers.zero_grad()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == last)
        return losses

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def steps(folder: Path) -> list[int]:
    found = (folder / "checkpoint").glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def purged(job: Job) -> None:
    """Wait for the thread that removes."""
    job.checkpointer.purge_queue.put(None)
    job.checkpointer.purge_thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_job_goes_on_as_if_it_had_not_stopped(tmp_path: Path, mode: str) -> None:
    whole = Job(tmp_path / "whole", async_mode=mode)
    expected = whole.run(8)
    whole.checkpointer.close()
    first = Job(tmp_path / "run", async_mode=mode)
    assert not first.checkpointer.load()
    losses = first.run(5)
    first.checkpointer.close()
    assert steps(tmp_path / "run") == [2, 4]
    second = Job(tmp_path / "run", async_mode=mode)
    assert second.checkpointer.load()
    assert (second.step, second.data.at) == (4, 4)
    again = second.run(8)
    second.checkpointer.close()
    assert losses[:4] + again == expected
    assert all(map(torch.equal, second.weights(), whole.weights()))


@pytest.mark.parametrize("writes", [CheckpointManager, TitansCheckpointManager])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_each_loads_what_the_other_saved(tmp_path: Path, writes: Any, mode: str) -> None:
    reads = TitansCheckpointManager if writes is CheckpointManager else CheckpointManager
    first = Job(tmp_path, writes, async_mode=mode)
    first.run(2)
    first.checkpointer.maybe_wait_for_saving()
    expected = first.run(4)
    first.checkpointer.maybe_wait_for_saving()
    second = Job(tmp_path, reads)
    assert second.checkpointer.load(2)
    assert second.step == 2
    assert second.run(4) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_valid_checkpoints_are_kept(tmp_path: Path, mode: str, keep: int) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("step-1", "step-3", "step-30", "other", "step-4.old"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__0_0.distcp").write_bytes(b"left by a save that was killed")
    job = Job(tmp_path, keep_latest_k=keep, async_mode=mode)
    job.run(10)
    job.checkpointer.maybe_wait_for_saving()
    purged(job)
    # An asynchronous save is not valid at once, and does not count until it is.
    under_way = 0 if mode == "disabled" else 1
    assert steps(tmp_path) == [2, 4, 6, 8, 10][-keep - under_way :]
    names = {path.name for path in folder.iterdir()}
    assert "step-1" not in names
    assert "step-3" not in names
    assert {"step-30", "other", "step-4.old"} <= names
    job.checkpointer.close()


def test_a_save_under_way_is_not_taken_for_a_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a relative folder, of a job that went back: newer checkpoints are there."""
    monkeypatch.chdir(tmp_path)
    job = Job(Path(), interval=10)
    job.run(20)
    job.checkpointer.close()
    again = Job(Path(), async_mode="async", keep_latest_k=2)
    checkpointer = again.checkpointer
    # As between the begin of a save and its commit.
    checkpointer._writer = pyckpt.DirectWriter("checkpoint/step-12")
    checkpointer.save_future = Future()
    for name in ("step-11", "step-12"):
        (tmp_path / "checkpoint" / name).mkdir()
    checkpointer._purge_stale_checkpoints()
    purged(again)
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-10", "step-12", "step-20"}
    checkpointer.save_future = None
    checkpointer.close()


def test_every_checkpoint_is_kept_where_all_are_to_be(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=0)
    job.run(8)
    assert steps(tmp_path) == [2, 4, 6, 8]
    job.checkpointer.close()


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_failed_save_reaches_the_job_once(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, async_mode=mode)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/step-2").write_text("in the way")
    with pytest.raises(NotADirectoryError, match="step-2"):
        job.run(4)
    assert job.step == 4
    (tmp_path / "checkpoint/step-2").unlink()
    job.run(6)
    job.checkpointer.close()
    assert steps(tmp_path) == [6]


def test_close_waits_for_a_save_and_tells_of_its_failure(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async")
    job.run(2)
    job.checkpointer.close()
    assert steps(tmp_path) == [2]
    job = Job(tmp_path / "other", async_mode="async")
    (tmp_path / "other/checkpoint").mkdir(parents=True)
    (tmp_path / "other/checkpoint/step-2").write_text("in the way")
    job.run(2)
    with pytest.raises(NotADirectoryError, match="step-2"):
        job.checkpointer.close()
    job.checkpointer.close()


def test_the_last_save_has_the_model_alone_where_asked(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    job.run(3, last=3)
    expected = job.weights()
    job.checkpointer.close()
    other = Job(tmp_path / "other", initial_load_path=str(tmp_path / "checkpoint/step-3"))
    assert other.checkpointer.load()
    assert other.step == 0
    assert all(
        torch.equal(a, b.bfloat16().float()) for a, b in zip(other.weights(), expected, strict=True)
    )
    other.checkpointer.close()


def test_a_seed_checkpoint_loads_the_model_alone(tmp_path: Path) -> None:
    seed = Job(tmp_path, create_seed_checkpoint=True, interval=1)
    torch.nn.init.ones_(seed.model[0].weight)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    job = Job(tmp_path)
    job.step = 7
    assert job.checkpointer.load()
    assert job.step == 7
    assert job.model[0].weight.eq(1).all()
    job.checkpointer.close()


def test_excluded_states_and_those_of_another_job_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.run(2)
    job.checkpointer.close()
    other = Job(tmp_path, exclude_from_loading=["lr_scheduler", "dataloader"])
    assert other.checkpointer.load()
    assert (other.step, other.data.at) == (2, 0)
    other.checkpointer.close()


def test_a_changed_model_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    job.checkpointer.close()
    wider = Job(tmp_path, width=9)
    with pytest.raises(LoadError, match=r"0\.weight: \(8, 8\) is not \(9, 8\)"):
        wider.checkpointer.load()
    wider.checkpointer.close()


def test_damage_is_found_before_training_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    job.checkpointer.close()
    (data,) = (tmp_path / "checkpoint/step-2").glob("*.distcp")
    content = bytearray(data.read_bytes())
    at = content.index(job.model[0].weight.detach().numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    other = Job(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"0\.weight"):
        other.checkpointer.load()
    other.checkpointer.close()


def test_a_disabled_checkpointer_does_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, enable=False)
    job.run(4)
    assert not job.checkpointer.load()
    job.checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_remote_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torchtitan's own"):
        Job(Path(), folder="gs://bucket/run")


@pytest.mark.parametrize("options", [{"interval": 0}, {"async_mode": "later"}, {"folder": " "}])
def test_wrong_options_are_refused_as_by_torchtitan(options: dict[str, Any]) -> None:
    for manager in (CheckpointManager, TitansCheckpointManager):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}|interval"):
            manager.Config(**options)
    assert CheckpointManager.Config(keep_latest_k=1).keep_latest_k == 1


def test_the_class_is_what_its_config_builds() -> None:
    assert CheckpointManager.Config._owner is CheckpointManager
    assert issubclass(CheckpointManager.Config, TitansCheckpointManager.Config)


@pytest.mark.parametrize(("mode", "at"), list(zip(MODES, (1, 3, 6), strict=True)))
def test_a_job_that_is_killed_while_it_saves_resumes(tmp_path: Path, mode: str, at: int) -> None:
    """At the system call on its files of that number."""
    script = f"""
        import sys
        sys.path[:0] = {[str(HERE), str(HERE.parent / "helpers")]!r}
        import torch.distributed as dist
        from pathlib import Path
        from test_torchtitan import Job
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        job = Job(Path(sys.argv[1]), async_mode={mode!r}, keep_latest_k=2)
        job.checkpointer.load()
        print("from", job.step, flush=True)
        job.run(job.step + 4)
        job.checkpointer.close()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)  # to step 4
    inject = f"inject=pwrite64,renameat,rename,fsync,fdatasync:signal=SIGKILL:when={at}"
    killed = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, "-e", inject, *command],
        capture_output=True,
        text=True,
    )
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stderr
    assert "from 4" in killed.stdout
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    begun = int(again.stdout.split()[-1])
    assert begun in (4, 6, 8)
    # torchtitan's own manager takes what is left for the same.
    stock = Job(tmp_path, TitansCheckpointManager)
    assert stock.checkpointer.load()
    assert stock.step == begun + 4


# --- several ranks --------------------------------------------------------------------------------


def _sharded_job(base: Path, mode: str) -> Job:
    job = Job(base, async_mode=mode, shard=True)
    job.checkpointer.load()
    return job


def _trained(base: str, mode: str, to: int) -> list[list[float]]:
    """Train to a step; the weights then, whole."""
    warnings.simplefilter("ignore")
    job = _sharded_job(Path(base), mode)
    job.run(to)
    job.checkpointer.close()
    return [parameter.full_tensor().flatten().tolist() for parameter in job.model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("later", [2, 1])
def test_sharded_ranks_resume_on_as_many_or_fewer(tmp_path: Path, mode: str, later: int) -> None:
    expected = run_ranks(2, _trained, str(tmp_path / "whole"), mode, 6)
    run_ranks(2, _trained, str(tmp_path / "run"), mode, 4)
    assert steps(tmp_path / "run") == [2, 4]
    resumed = run_ranks(later, _trained, str(tmp_path / "run"), mode, 6)
    for ours, theirs in zip(resumed[0], expected[0], strict=True):
        # The data is the same on all ranks, so that their number changes nothing but rounding.
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert later == 1 or resumed == expected


# --- what is used of torchtitan -------------------------------------------------------------------


def test_torchtitan_still_has_what_the_manager_stands_on() -> None:
    """A release that changes one of these needs a look at pyckpt/integrations/torchtitan.py."""
    names = lambda function: list(inspect.signature(function).parameters)  # noqa: E731
    saves = ["self", "state_dict", "checkpoint_id", "async_mode"]
    assert names(TitansCheckpointManager.dcp_save) == [
        *saves,
        "enable_garbage_collection",
        "to_hf",
    ]
    assert names(TitansCheckpointManager.dcp_load) == [
        *("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    ]
    for name in ("_maybe_wait_for_staging", "_wait_for_saving", "_close", "_should_purge"):
        assert names(getattr(TitansCheckpointManager, name)) == ["self"], name
    # The saves of a step end with it, and set these before it.
    source = inspect.getsource(TitansCheckpointManager._save)
    assert source.index("self.save_future = ") < source.index("self._purge_stale_checkpoints()")


# --- the document ---------------------------------------------------------------------------------


def test_the_documented_loop_resumes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = root / "examples/integrations/torchtitan_loop.py"
    assert script.read_text() in (root / "docs/integrations/torchtitan.md").read_text()

    def run(steps: int, folder: Path) -> list[str]:
        command = [sys.executable, "-W", "ignore", str(script), str(folder), str(steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    whole = run(12, tmp_path / "whole")
    run(7, tmp_path / "run")
    resumed = run(12, tmp_path / "run")
    assert resumed[0] == "training from step 6"
    assert resumed[1:] == whole[6:]
