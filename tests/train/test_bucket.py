"""Jobs that write to one bucket at the same time, and what happens to their objects there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import _s3
import pytest
import torch

import pyckpt
from pyckpt.errors import Superseded
from pyckpt.format import commit, metadata
from pyckpt.train.store.retention import Retention
from pyckpt.train.tiers.bucket import BucketTier

pytestmark = pytest.mark.slow

URL = "s3://runs/x"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def value_of(step: int) -> int:
    return int(pyckpt.load(f"{URL}/{name_of(step)}")["w"][0])


class Job:
    """A job with its directory and its mirror."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tier = BucketTier(URL, directory)

    def bring(self, step: int, value: int) -> set[str]:
        """Save a step and bring it to the mirror; returns the names of its data files."""
        path = self.directory / name_of(step)
        pyckpt.save({"w": torch.full((5,), value)}, path, overwrite=True)
        files = metadata.data_files(metadata.read(path / commit.metadata_name()))
        self.tier.begin()
        for file in files.keys() - self.tier.sizes(step).keys():
            self.tier.upload(step, path / file, lambda count: None)
        self.tier.commit(step, (path / commit.metadata_name()).read_bytes(), files.keys())
        return set(files)

    def prune(self, committed: int) -> list[int]:
        return self.tier.prune(
            Retention(1), committed=committed, staying=(), passed=lambda step: False
        )


class Hook:
    """Fails requests, or calls something once, before one of them is answered."""

    def __init__(self) -> None:
        self.matches: Callable[[str, str], bool] = lambda method, path: False
        self.then: Callable[[], object] | None = None
        self.refuses: Callable[[str, str], bool] = lambda method, path: False

    def before(self, matches: Callable[[str, str], bool], then: Callable[[], object]) -> None:
        self.matches, self.then = matches, then

    def __call__(
        self, method: str, path: str, answer: Callable[[], list[bytes]]
    ) -> list[bytes] | int:
        if self.then is not None and self.matches(method, path):
            then, self.then = self.then, None
            then()
        return 403 if self.refuses(method, path) else answer()


class Store:
    def __init__(self, bucket: Any, hook: Hook) -> None:
        self.bucket = bucket
        self.hook = hook

    def names(self, below: str = "") -> list[str]:
        found = (one.key for one in self.bucket.objects.filter(Prefix=f"x/{below}"))
        return [key.rpartition("/")[2] for key in found]

    def remove(self, below: str) -> None:
        self.bucket.objects.filter(Prefix=f"x/{below}").delete()


@pytest.fixture
def store() -> Iterator[Store]:
    hook = Hook()
    with _s3.bucket(hook=hook) as bucket:
        yield Store(bucket, hook)


@pytest.fixture
def old(tmp_path, store) -> Job:
    """A job that has brought the steps 1 to 3."""
    job = Job(tmp_path / "old")
    for step in (1, 2, 3):
        job.bring(step, step)
    return job


# --- another job begins in the middle ---


@pytest.mark.parametrize("step", [3, 4])
def test_a_job_that_was_replaced_while_it_commits_does_not_win(tmp_path, store, old, step):
    """Before the old one reads what it replaces, which may be nothing, another has taken over."""
    new = Job(tmp_path / "new")
    store.hook.before(
        lambda method, path: method == "GET" and f"{name_of(step)}/.metadata" in path,
        lambda: new.bring(step, 100),
    )
    with pytest.raises(Superseded):
        old.bring(step, 50)
    assert value_of(step) == 100
    new.bring(step, 101)
    assert value_of(step) == 101


def test_a_commit_between_read_and_write_is_not_replaced(tmp_path, store, old):
    """Its condition fails, and it does not read again."""
    new = Job(tmp_path / "new")
    store.hook.before(
        lambda method, path: method == "PUT" and f"{name_of(3)}/.metadata" in path,
        lambda: new.bring(3, 100),
    )
    with pytest.raises(FileExistsError):
        old.bring(3, 50)
    with pytest.raises(Superseded):
        old.bring(3, 51)
    assert value_of(3) == 100


@pytest.mark.parametrize("commits", [True, False])
def test_what_another_job_may_save_while_one_prunes_stays(tmp_path, store, old, commits):
    new = Job(tmp_path / "new")
    store.hook.before(
        lambda method, path: method == "PUT" and f"{name_of(1)}/.saving" in path,
        lambda: new.bring(2, 100) if commits else new.tier.begin(),
    )
    with nullcontext() if commits else pytest.raises(Superseded):
        assert old.prune(3) == [1]
    assert (value_of(2), value_of(3)) == (100 if commits else 2, 3)


def test_what_is_saved_without_a_job_while_one_prunes_stays(store, old):
    store.hook.before(
        lambda method, path: method == "PUT" and f"{name_of(1)}/.saving" in path,
        lambda: pyckpt.save({"w": torch.full((5,), 100)}, f"{URL}/{name_of(2)}", overwrite=True),
    )
    assert old.prune(3) == [1]
    assert (value_of(2), value_of(3)) == (100, 3)
    assert old.prune(3) == [2]
    assert store.names("step-") == store.names(name_of(3))


# --- the objects of generations ---


def test_a_generation_that_is_gone_is_made_again(tmp_path, store, old):
    store.remove(".pyckpt")
    assert old.tier.holder() is None
    old.bring(4, 4)
    assert old.tier.holder() == old.tier._token
    new = Job(tmp_path / "new")
    new.bring(5, 5)
    with pytest.raises(Superseded):
        old.bring(6, 6)
    new.bring(7, 7)
    assert len(store.names(".pyckpt/")) == 1


@pytest.mark.parametrize("generations", [1, 2])
def test_a_job_that_has_begun_after_a_generation_was_removed_goes_on(tmp_path, store, generations):
    """Its number is then that of the old job, or a smaller one."""
    for _ in range(generations):
        old = Job(tmp_path / "old")
        old.tier.begin()
    old.bring(1, 1)
    store.remove(".pyckpt")
    new = Job(tmp_path / "new")
    new.bring(2, 2)
    with pytest.raises(Superseded):
        old.bring(2, 50)
    new.bring(3, 3)
    assert value_of(2) == 2


def test_a_generation_that_another_makes_again_first_is_the_others(tmp_path, store, old):
    store.remove(".pyckpt")
    new = Job(tmp_path / "new")
    store.hook.before(lambda method, path: method == "PUT" and "generation" in path, new.tier.begin)
    with pytest.raises(Superseded):
        old.tier.begin()
    new.bring(2, 100)
    assert value_of(2) == 100


# --- what an interruption leaves ---


def refuses_removal(method: str, path: str) -> bool:
    return method == "POST" and "delete" in path


def test_what_a_commit_replaced_is_removed_when_it_is_tried_again(store, old):
    store.hook.refuses = refuses_removal
    with pytest.raises(OSError, match="refuses"):
        old.bring(3, 50)
    assert value_of(3) == 50
    store.hook.refuses = lambda method, path: False
    path = old.directory / name_of(3)
    content = (path / commit.metadata_name()).read_bytes()
    files = metadata.data_files(metadata.read(path / commit.metadata_name()))
    old.tier.commit(3, content, files.keys())
    assert set(store.names(name_of(3))) == {".metadata", *files}


def test_what_a_commit_replaced_is_removed_by_the_next_job(tmp_path, store, old):
    store.hook.refuses = refuses_removal
    with suppress(OSError):
        old.bring(3, 50)
    store.hook.refuses = lambda method, path: False
    other = "__1_0123456789abcdef0123456789abcdef.distcp"  # of a save that may go on
    store.bucket.put_object(Key=f"x/{name_of(3)}/{other}", Body=b"data")
    new = Job(tmp_path / "old")
    new.bring(1, 60)
    assert new.prune(1) == [2]
    path = old.directory / name_of(3) / commit.metadata_name()
    files = metadata.data_files(metadata.read(path))
    assert set(store.names(name_of(3))) == {".metadata", *files, other}
    assert (value_of(1), value_of(3)) == (60, 50)
