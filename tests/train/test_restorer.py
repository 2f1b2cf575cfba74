"""What makes a restore go back to an older checkpoint, and what does not."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.data
from _crash_child import run_traced, traced
from _ranks import Pipe, run_child, run_ranks
from _sampling import slow

import pyckpt
from pyckpt import Checkpointer
from pyckpt.errors import CorruptCheckpoint, LoadError, PyckptError
from pyckpt.train import restorer
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store import transient


class Corpus:
    """Opens its file again when it is restored; on one rank, perhaps, the file is not there."""

    def __init__(self, file: Path, absent_on: int = 0) -> None:
        self.file = file
        self.absent_on = absent_on

    def state_dict(self) -> dict[str, Any]:
        return {"file": str(self.file)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not dist.is_initialized() or dist.get_rank() == self.absent_on:
            with open(state["file"]):
                pass


def save(directory: Path, *steps: int, **state: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"step": step, **state})


def restore_without_the_file(directory: Path, absent_on: int) -> tuple[str, set[int], int | None]:
    state = {"step": 0, "data": Corpus(directory / "corpus", absent_on)}
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(LoadError) as info:
            checkpointer.restore(state)
        distrusted = set(checkpointer._restorer.distrusted)
        (directory / "corpus").touch()
        return str(info.value), distrusted, checkpointer.restore(state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_of_an_object_is_no_damage(ranks: int, tmp_path: Path) -> None:
    save(tmp_path, 1, 2, data=Corpus(tmp_path / "corpus"))
    results = run_ranks(ranks, restore_without_the_file, tmp_path, ranks - 1)
    for told, distrusted, restored in results:
        assert "data: FileNotFoundError: " in told
        assert not distrusted
        assert restored == 2


def test_the_error_of_an_object_is_the_cause(tmp_path: Path) -> None:
    save(tmp_path, 1, data=Corpus(tmp_path / "corpus"))
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(LoadError, match="data: FileNotFoundError") as info,
    ):
        checkpointer.restore({"data": Corpus(tmp_path / "corpus")})
    assert isinstance(info.value.__cause__, FileNotFoundError)


def with_descriptors(spare: int, call: Callable[[], Any]) -> Any:
    """Call with so few file descriptors left."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        return call()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def restore_with_few_descriptors(pipe: Pipe, directory: Path) -> tuple[int | None, list[Any]]:
    told: list[Any] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    with Checkpointer(directory) as checkpointer:
        state = {"step": 0}
        assert checkpointer.restore(state) == 2  # imports what it needs

        def fails(call: Callable[[], Any]) -> None:
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                call()

        logging.getLogger("pyckpt").addHandler(handler)
        with_descriptors(0, lambda: fails(lambda: checkpointer._catalog.examine(2)))
        for spare in (0, 1):  # not enough to look, and not enough to load
            with_descriptors(spare, lambda: fails(lambda: checkpointer.restore(state)))
        return checkpointer.restore(state), [record.getMessage() for record in told]


def test_a_lack_of_descriptors_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert run_child(restore_with_few_descriptors, tmp_path) == (2, [])


# --- errors of the file system ---


def restore_traced(pipe: Pipe, directory: Path) -> tuple[Any, list[str]]:
    """What a restore came to, traced, and what the log said of checkpoints."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    transient.DELAYS = (0.0, 0.0, 0.0)  # type: ignore[assignment]
    restorer.DELAYS = (0.0, 0.0, 0.0)  # type: ignore[attr-defined]
    state = {"x": torch.zeros(100_000), "step": 0}
    with pyckpt.Engine(io_threads=1) as engine:
        with Checkpointer(directory, engine=engine) as checkpointer:
            assert checkpointer.restore(state) == 2  # imports and starts what it needs
        logging.getLogger("pyckpt").addHandler(handler)
        with Checkpointer(directory, engine=engine) as checkpointer:
            state["step"] = 0
            with traced(pipe):
                try:
                    result: Any = checkpointer.restore(state)
                except (OSError, PyckptError) as error:
                    result = error
    return (result if isinstance(result, Exception) else (result, state["step"])), told


def restore_with(directory: Path, inject: str) -> tuple[Any, list[str]]:
    save(directory, 1, 2, x=torch.ones(100_000))
    done = run_traced(restore_traced, directory, inject=inject)
    assert done.injected, f"{inject} never came to pass"
    result: tuple[Any, list[str]] = done.result
    return result


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(
    "inject",
    [
        "openat:error=ESTALE:when=1",
        *(slow(f"openat:error=ESTALE:when={nth}") for nth in range(2, 7)),
        "openat:error=EIO:when=2..4",
        "newfstatat:error=ESTALE:when=1",
        "getdents64:error=ESTALE:when=1",
        "pread64:error=EAGAIN:when=1..3",
        "pread64:error=EINTR:when=1..3",
        "pread64:error=EIO:when=1",
        "pread64:error=ESTALE:when=1",
        "pread64:error=ETIMEDOUT:when=2",
    ],
)
def test_what_passes_does_not_cost_the_newest(inject: str, tmp_path: Path) -> None:
    result, told = restore_with(tmp_path, inject)
    assert result == (2, 2)
    assert not any("passed over" in line for line in told)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(
    ("inject", "number"),
    [
        ("pread64:error=ETIMEDOUT", errno.ETIMEDOUT),
        slow("pread64:error=ESTALE", errno.ESTALE),
        slow("pread64:error=EAGAIN", errno.EAGAIN),
        ("openat:error=EACCES:when=2+", errno.EACCES),
        slow("openat:error=ESTALE:when=1+", errno.ESTALE),
        ("newfstatat:error=ENOTCONN", errno.ENOTCONN),
    ],
)
def test_what_is_no_damage_is_raised(inject: str, number: int, tmp_path: Path) -> None:
    result, told = restore_with(tmp_path, inject)
    assert isinstance(result, OSError), result
    assert result.errno == number
    assert not any("passed over" in line for line in told)


@pytest.mark.usefixtures("strace")
def test_a_disk_that_cannot_read_is_damage(tmp_path: Path) -> None:
    # Four attempts at the newest, with one read each, and then the older one.
    result, told = restore_with(tmp_path, "pread64:error=EIO:when=1..4")
    assert result == (1, 1)
    (line,) = [line for line in told if "passed over for an older" in line]
    assert str(tmp_path / "step-00000002") in line
    assert os.strerror(errno.EIO) in line


def restore_with_stale_reads(directory: Path, on: int) -> tuple[int | None, float]:
    """On one rank the first reads fail, in a way that passes."""
    restorer.DELAYS = (0.0, 0.0, 0.0)  # type: ignore[attr-defined]
    real, left = restorer.DirectReader.read_data, [2]

    def stale(self: Any, *args: Any) -> Any:
        if dist.get_rank() == on and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "somewhere")
        return real(self, *args)

    restorer.DirectReader.read_data = stale  # type: ignore[method-assign]
    state = {"x": torch.zeros(10), "step": 0}
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore(state), float(state["x"].sum())


@pytest.mark.parametrize("on", [0, 1])
def test_all_ranks_try_again_what_failed_on_one(on: int, tmp_path: Path) -> None:
    save(tmp_path, 1, 2, x=torch.ones(10))
    assert run_ranks(2, restore_with_stale_reads, tmp_path, on) == [(2, 10.0)] * 2


def restore_without_descriptors(directory: Path, on: int) -> str:
    """One rank cannot open the checkpoint that it is to read."""
    real = restorer.reading

    def reading(path: Path) -> Any:
        if dist.get_rank() == on:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path)

    restorer.reading = reading  # type: ignore[attr-defined]
    with Checkpointer(directory) as checkpointer, pytest.raises((LoadError, OSError)) as info:
        checkpointer.restore({"x": torch.zeros(10), "step": 0})
    return str(info.value)


def test_the_others_name_the_rank_that_failed(tmp_path: Path) -> None:
    save(tmp_path, 1, x=torch.ones(10))
    told = run_ranks(3, restore_without_descriptors, tmp_path, 1)
    where = tmp_path / "step-00000001"
    assert set(told) == {f"[Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)} (rank 1): '{where}'"}


def restore_where_it_cannot_be_listed(directory: Path, file_on: int) -> str:
    """On one rank there is a file in the directory's place."""
    if dist.get_rank() == file_on:
        directory = directory.parent / "file"
        directory.touch()
    state = {"step": 0}
    with (
        Checkpointer(directory) as checkpointer,
        pytest.raises(NotADirectoryError) as info,
    ):
        checkpointer.restore(state)
    assert state == {"step": 0}
    return str(info.value)


@pytest.mark.parametrize("file_on", [0, 1])
def test_all_ranks_fail_where_one_cannot_list_the_directory(file_on: int, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    told = run_ranks(2, restore_where_it_cannot_be_listed, tmp_path / "run", file_on)
    assert all(f"rank {file_on}" in message for message in told)


class Mover:
    """Takes the checkpoints away once they are loaded, and leaves a file in their place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def state_dict(self) -> dict[str, Any]:
        return {"moves": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            self.directory.rename(self.directory.with_suffix(".moved"))
            self.directory.touch()


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("of this handler")


def restore_with_a_broken_log(directory: Path) -> tuple[str, int | None]:
    state: dict[str, Any] = {"step": 0}
    logger = logging.getLogger("pyckpt")
    logger.setLevel(logging.INFO)
    said = ""
    with Checkpointer(directory) as checkpointer:
        handler = BrokenHandler() if dist.get_rank() == 0 else logging.NullHandler()
        logger.addHandler(handler)
        try:
            checkpointer.restore(state)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        logger.removeHandler(handler)
        return said, checkpointer.restore(state)


def test_a_log_that_raises_is_no_rank_that_is_lost(tmp_path: Path) -> None:
    save(tmp_path, 1)
    results = run_ranks(2, restore_with_a_broken_log, tmp_path)
    assert results == [("RuntimeError: of this handler", 1), ("", 1)]


def restore_and_lose(directory: Path) -> int | None:
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore({"step": 0, "mover": Mover(directory)})


def test_a_restore_that_is_over_does_not_fail(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save(directory, 1, mover=Mover(directory))
    assert run_ranks(2, restore_and_lose, directory) == [1, 1]


class Unready:
    """Has no state before it is used."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not used yet")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Opaque:
    """A class that loading would not make."""


class Holder(Unready):
    def state_dict(self) -> dict[str, Any]:
        return {"inside": Opaque()}


UNUSABLE: dict[str, Callable[[], Any]] = {
    "data": lambda: torch.utils.data.DataLoader([1, 2]),  # type: ignore[arg-type]
    "config": lambda: {"of": [Opaque()]},
    "holder": Holder,
    "own": lambda: pyckpt.PerRank([Opaque()]),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_saved_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    state = {name: UNUSABLE[name](), "step": 0}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError) as at_start:
            checkpointer.restore(state)
        with pytest.raises(TypeError, match=name) as when_saved:
            AppState(state).state_dict()
        assert str(at_start.value) == str(when_saved.value)
        assert checkpointer.restore({"step": 0, "later": Unready()}) is None


def restore_unusable(directory: Path) -> str:
    state = {"config": Opaque() if dist.get_rank() == 1 else None}
    with (
        Checkpointer(directory) as checkpointer,
        pytest.raises((TypeError, LoadError)) as info,
    ):
        checkpointer.restore(state)
    return f"{info.type.__name__}: {info.value}"


def test_all_ranks_refuse_what_one_cannot_save(tmp_path: Path) -> None:
    first, second = run_ranks(2, restore_unusable, tmp_path)
    assert first.startswith("LoadError: the state of rank 1 cannot be saved")
    assert second.startswith("TypeError: config is or contains")


# --- checkpoints without their metadata ---


def test_a_copy_without_its_metadata_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    copy = tmp_path / "copy" / "step-00000001"
    copy.mkdir(parents=True)
    for file in (tmp_path / "step-00000001").glob("[!.]*"):  # as a shell understands *
        shutil.copy(file, copy)
    says = "'cp directory/\\*' leaves that out"
    with Checkpointer(tmp_path / "copy") as checkpointer:
        with pytest.raises(CorruptCheckpoint, match=says):
            checkpointer.restore({"step": 0})
        (entry,) = checkpointer.inspect()
        assert entry.state == "damaged"
        with pytest.raises(FileExistsError, match=r"without its \.metadata"):
            checkpointer.save(1, {"step": 1}).wait()
        assert len(os.listdir(copy)) == 1
        with pytest.raises(FileExistsError):
            checkpointer.close()
    with pytest.raises(FileNotFoundError, match=says):
        pyckpt.load({"step": 0}, copy)


def test_one_beside_others_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / ".metadata").unlink()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"step": 0}) == 1
    assert "passed over step-00000002: damaged (data files, and no .metadata" in caplog.text


# --- nothing to restore ---


def lay_out_typo(root: Path) -> Path:
    return root / "typo"


def lay_out_empty(root: Path) -> Path:
    return root


def lay_out_a_checkpoint(root: Path) -> Path:
    save(root, 1)
    return root / "step-00000001"


def lay_out_lost_metadata(root: Path) -> Path:
    (lay_out_a_checkpoint(root) / ".metadata").unlink()
    return root / "step-00000001"


def lay_out_a_killed_save(root: Path) -> Path:
    directory = lay_out_a_checkpoint(root)
    (directory / ".metadata").rename(directory / ".saving")
    return directory


def lay_out_other_names(root: Path) -> Path:
    dcp.save({"step": 1}, checkpoint_id=root / "step-500")
    return root


def lay_out_transformers(root: Path) -> Path:
    (root / "checkpoint-5").mkdir()
    return root


def lay_out_unfinished(root: Path) -> Path:
    (root / "step-00000007").mkdir()
    return root


@pytest.mark.parametrize(
    ("lay_out", "says"),
    [
        (lay_out_typo, "no such directory"),
        (lay_out_empty, "is empty"),
        (lay_out_a_checkpoint, "itself a checkpoint; pass {root}, or load it with pyckpt.load"),
        (lay_out_lost_metadata, "data files, and no .metadata: 'cp directory/*' leaves that out"),
        (lay_out_a_killed_save, "it holds what a save or a removal left that was interrupted"),
        (lay_out_other_names, "holds step-500, which pyckpt.load reads"),
        (lay_out_transformers, "1 entry is not named as step-00000500 is: checkpoint-5"),
        (lay_out_unfinished, "step-00000007: unfinished"),
    ],
)
def test_the_log_says_what_is_there_instead(
    lay_out: Callable[[Path], Path], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = lay_out(tmp_path)
    with Checkpointer(directory) as checkpointer:
        caplog.clear()
        assert checkpointer.restore({"step": 0}) is None
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert str(directory) in record.getMessage()
        assert says.format(root=tmp_path) in record.getMessage()
        with pytest.raises(FileNotFoundError, match=re.escape(says.format(root=tmp_path))):
            checkpointer.restore({"step": 0}, required=True)


def require_a_checkpoint(directory: Path) -> str:
    with Checkpointer(directory) as checkpointer, pytest.raises(FileNotFoundError) as info:
        checkpointer.restore({"step": 0}, required=True)
    return str(info.value)


def test_all_ranks_require_a_checkpoint(tmp_path: Path) -> None:
    told = run_ranks(2, require_a_checkpoint, tmp_path / "typo")
    assert all("no such directory" in line for line in told)


def test_a_checkpoint_that_is_required_and_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"step": 0}, required=True) == 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params),
}
ALIKE = [{"SGD", "momentum"}, {"AdamW", "fused"}]


def trained(kind: str) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = OPTIMIZERS[kind](model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "saved", [kind if kind in ("SGD", "fused") else slow(kind) for kind in OPTIMIZERS]
)
def test_an_optimizer_of_another_kind_is_an_error(saved: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, trained(saved))
    for kind in OPTIMIZERS:
        with Checkpointer(tmp_path) as checkpointer:
            if kind == saved or {kind, saved} in ALIKE:
                assert checkpointer.restore(trained(kind)) == 1
            else:
                with pytest.raises(LoadError, match="of another optimizer"):
                    checkpointer.restore(trained(kind))


def test_what_programs_add_to_groups_is_no_other_optimizer(tmp_path: Path) -> None:
    state = trained("AdamW")
    state["optimizer"].param_groups[0]["layer"] = 3
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        assert checkpointer.restore(trained("AdamW")) == 1


# --- what wins ---


def test_what_was_saved_wins_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyckpt")
    save(tmp_path, 1, total_epochs=5, config={"lr": 0.1, "data": {"seed": 1}}, same=True)
    state = {
        "step": 0,
        "total_epochs": 10,
        "config": {"lr": 0.1, "data": {"seed": 2}},
        "same": True,
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state)
        report = checkpointer.load_report
    assert state["total_epochs"] == 5
    assert report is not None
    assert [str(one) for one in report.differing] == [
        "step (0 -> 1)",
        "total_epochs (10 -> 5)",
        "config.data.seed (2 -> 1)",
    ]
    assert "3 otherwise in the state than saved: step (0 -> 1), total_epochs (10 -> 5)" in str(
        report
    )
    assert "total_epochs is 10 in the state and 5 in" in caplog.text


def test_the_caller_may_say_that_the_state_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyckpt")
    save(tmp_path, 1, total_epochs=5, config={"lr": 0.1, "data": {"seed": 1}}, model=linear(1.0))
    state: dict[str, Any] = {
        "step": 0,
        "total_epochs": 10,
        "config": {"lr": 0.3, "data": {"seed": 2, "new": 3}},
        "model": linear(2.0),
        "limit": torch.full((2,), 4.0),
    }
    keep = ["total_epochs", "config.data.seed", "config.data.new", "model", "limit"]
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state, keep=keep) == 1
        report = checkpointer.load_report
    assert (state["step"], state["total_epochs"]) == (1, 10)
    assert state["config"] == {"lr": 0.1, "data": {"seed": 2, "new": 3}}
    assert float(state["model"].weight.detach().sum()) == 2.0
    assert report is not None
    assert "total_epochs (10, not 5)" in map(str, report.differing)
    assert "config.data.seed (2, not 1)" in map(str, report.differing)
    assert {"model", "limit"} <= set(report.kept)
    assert "it was kept as it is" in caplog.text


def test_tensors_that_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, x=torch.zeros(3), inside={"y": torch.zeros(3), "z": torch.zeros(3)})
    state = {"x": torch.ones(3), "inside": {"y": torch.ones(3), "z": torch.ones(3)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state, keep=["x", "inside.y"])
    sums = [float(one.sum()) for one in (state["x"], *state["inside"].values())]  # type: ignore[attr-defined]
    assert sums == [3.0, 3.0, 0.0]


def linear(value: float) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(value)
    return module
