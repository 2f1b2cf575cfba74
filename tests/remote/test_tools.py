"""What looks at checkpoints, where these are in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from _cli import pyckpt as command
from obstore.store import LocalStore

import pyckpt
from pyckpt.remote import folder, objects
from pyckpt.remote.objects import Objects
from pyckpt.tools.comparing import compare
from pyckpt.tools.contents import contents
from pyckpt.tools.listing import listing


@pytest.fixture
def url(tmp_path, monkeypatch) -> str:
    """An address in a store of obstore that is a directory."""

    def store(url: str) -> LocalStore:
        return LocalStore(str(tmp_path / "there") + url.removeprefix("s3://bucket"), mkdir=True)

    for module in (folder, objects):
        monkeypatch.setattr(module, "open_store", store)
    return "s3://bucket/run"


def upload(directory: Path, url: str) -> None:
    for file in directory.iterdir():
        if file.is_file():
            Objects(url).put(file.name, file.read_bytes())


def test_the_contents_are_those_of_the_directory(url, tmp_path):
    state = {"model": {"w": torch.randn(5, 3)}, "names": ["a"], "n": 1}
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, metrics={"loss": 0.5}).wait()
    step = tmp_path / "step-00000007"
    upload(step, f"{url}/{step.name}")
    here, there = contents(step), contents(f"{url}/{step.name}/")
    assert there.path == f"{url}/{step.name}"
    assert there.keys == here.keys
    assert there.files == here.files
    assert (there.saved.step, there.saved.metrics) == (7, {"loss": 0.5})
    assert there.saved.time >= here.saved.time


def test_inspecting_reads_no_data(url, monkeypatch):
    pyckpt.save({"w": torch.zeros(100_000), "text": "x" * 1000}, url)
    read: list[str] = []
    get = obstore.get

    def reading(store: Any, name: str) -> Any:
        read.append(name)
        return get(store, name)

    monkeypatch.setattr(obstore, "get", reading)
    monkeypatch.setattr(obstore, "get_range", None)
    assert [key.name for key in contents(url).keys] == ["w", "text"]
    assert read == [".metadata"]


def test_the_listing_says_what_is_there(url, tmp_path):
    for step in (1, 2, 3):
        pyckpt.save({"w": torch.ones(10)}, f"{url}/step-{step:08d}")
    data = next(name for name in Objects(f"{url}/step-00000002").list() if "distcp" in name)
    Objects(f"{url}/step-00000002").put(data, b"short")
    Objects(f"{url}/step-00000003").delete([".metadata"])
    for name in (".saving", "__0_a.distcp"):
        Objects(f"{url}/step-00000004").put(name, b"")
    Objects(f"{url}/notes").put("a.txt", b"")
    Objects(f"{url}/.pyckpt").put("generation-00000001", b"")
    found = {one.name: one for one in listing(url)}
    assert {name: one.state for name, one in found.items()} == {
        "step-00000001": "valid",
        "step-00000002": "damaged",
        "step-00000003": "damaged",
        "step-00000004": "unfinished",
        "notes": "foreign",
    }
    assert found["step-00000001"].ranks == 1
    assert found["step-00000001"].age is not None
    with pytest.raises(ValueError, match="is itself a checkpoint"):
        listing(f"{url}/step-00000001")


def test_a_checkpoint_that_the_store_refuses_is_not_called_damaged(url, monkeypatch):
    for step in (1, 2, 3, 4):
        pyckpt.save({"w": torch.ones(10)}, f"{url}/step-{step:08d}")
    Objects(f"{url}/step-00000004").put(".metadata", b"short")
    get, listed = obstore.get, obstore.list_with_delimiter

    def refusing(store: Any, name: str) -> Any:
        if str(store.prefix).endswith("step-00000001"):
            raise obstore.exceptions.PermissionDeniedError("not yours")
        return get(store, name)

    def failing(store: Any, *args: Any) -> Any:
        if str(store.prefix).endswith("step-00000002"):
            raise obstore.exceptions.GenericError("no answer")
        return listed(store, *args)

    monkeypatch.setattr(obstore, "get", refusing)
    monkeypatch.setattr(obstore, "list_with_delimiter", failing)
    found = listing(url)
    assert [one.state for one in found] == ["unreadable", "unreadable", "valid", "damaged"]
    assert "credentials" in found[0].reason
    assert "the store failed" in found[1].reason


def test_removing_goes_on_behind_a_name_that_is_not_there(url, monkeypatch):
    delete = obstore.delete

    def giving_up(store: Any, names: Any) -> None:
        for name in [names] if isinstance(names, str) else names:
            if name not in set(objects.list()):
                raise FileNotFoundError(name)  # and those behind it stay
            delete(store, name)

    monkeypatch.setattr(obstore, "delete", giving_up)
    objects = Objects(url)
    for name in ("a", "c", "d"):
        objects.put(name, b"")
    objects.delete(["a", "b", "c"])
    assert set(objects.list()) == {"d"}
    objects.delete(["b"])


def test_checkpoints_in_a_store_and_in_a_directory_are_compared(url, tmp_path):
    state = {"w": torch.randn(100), "n": [1, 2], "strided": torch.randn(4, 5).t()}
    pyckpt.save(state, url)
    pyckpt.save(state, tmp_path / "a")
    assert compare(url, tmp_path / "a").good
    state["w"][3] += 1
    state["n"] = [1, 3]
    pyckpt.save(state, tmp_path / "b")
    assert sorted(one.key for one in compare(tmp_path / "b", url).differences) == ["n", "w"]


@pytest.mark.parametrize("bare", [False, True])
def test_a_models_weights_are_loaded_from_a_store(url, bare):
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    pyckpt.save(model.state_dict() if bare else {"model": model, "step": 3}, url)
    pyckpt.load_model(other, url)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(FileNotFoundError, match="no checkpoint is at this address"):
        pyckpt.load_model(other, url.rpartition("/")[0] + "/none")


def test_the_command_line_takes_addresses(url, tmp_path):
    for there in (f"{url}/step-00000001", tmp_path / "step-00000001"):
        pyckpt.save({"w": torch.zeros(10)}, there)
    for place in (f"{url}/step-00000001", (tmp_path / "step-00000001").as_uri()):
        found = command("inspect", place, "--json")
        assert '"w"' in found.out
        assert command("inspect", place, "w", "--stats").status == 0
        assert command("diff", place, tmp_path / "step-00000001").status == 0
    for place in (url, tmp_path.as_uri()):
        found = command("ls", place, "--json").json
        assert [one["state"] for one in found if one["step"] == 1] == ["valid"]
    assert command("verify", tmp_path.as_uri()).status == 0


@pytest.mark.parametrize(
    "arguments",
    [("verify",), ("prune", "--keep-last", "1"), ("export", "out"), ("repair-optimizer",)],
    ids=lambda arguments: arguments[0],
)
def test_what_takes_no_address_says_so(arguments):
    done = command(arguments[0], "s3://bucket/run", *arguments[1:])
    assert done.status == 2
    assert "download it" in " ".join(done.err.replace("│", " ").split())
