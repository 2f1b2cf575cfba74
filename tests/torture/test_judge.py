"""The judge of directories objects to what is lost, misshapen or in another's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torture import kernel

pytestmark = [
    pytest.mark.slow,  # the scenarios import all of pyckpt
    pytest.mark.skipif(not kernel.supported(), reason="needs Linux on x86-64"),
]

VALUE = 2


def lost_key(model: dict[str, Any]) -> None:
    del model["layer2"]


def another_key(model: dict[str, Any]) -> None:
    model["layer9"] = model["layer2"]


def renamed_key(model: dict[str, Any]) -> None:
    model["layer9"] = model.pop("layer2")


def wrong_shape(model: dict[str, Any]) -> None:
    model["shared"] = model["shared"].reshape(3000, 8)


def wrong_type(model: dict[str, Any]) -> None:
    model["small"] = model["small"].double()


def swapped_blocks(model: dict[str, Any]) -> None:
    flat = model["shared"].view(-1)
    flat[:2048], flat[2048:4096] = flat[2048:4096].clone(), flat[:2048].clone()


def swapped_shards(model: dict[str, Any]) -> None:
    rows = model["shared"]
    rows[:4], rows[4:] = rows[4:].clone(), rows[:4].clone()


def one_element(model: dict[str, Any]) -> None:
    model["fixed"][7, 699] += 1


def of_another_save(model: dict[str, Any]) -> None:
    from torture.scenarios import tensors_of

    model["layer3"] = tensors_of(VALUE - 1)["layer3"]


def swapped_tensors(model: dict[str, Any]) -> None:
    model["shared"][0, :3], model["small"] = model["small"], model["shared"][0, :3].clone()


DEFECTS: dict[Callable[[dict[str, Any]], None], str] = {
    lost_key: "layer2 is missing",
    another_key: "layer9 is there",
    renamed_key: "layer2 is missing",
    wrong_shape: r"shared is \(3000, 8\)",
    wrong_type: "small is .* of torch.float64",
    swapped_blocks: "shared has 4096 wrong elements",
    swapped_shards: "shared has 24000 wrong elements",
    one_element: "fixed has 1 wrong elements",
    of_another_save: "layer3 has 603 wrong elements",
    swapped_tensors: "shared has 3 wrong elements",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_a_checkpoint_is_seen(
    defect: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    import pyckpt
    from torture import judge
    from torture.scenarios import tree_of

    tree = tree_of(VALUE)
    pyckpt.save(tree, tmp_path / "sound")
    assert judge.checkpoint(tmp_path / "sound") == VALUE
    defect(tree["model"])
    pyckpt.save(tree, tmp_path / "other")
    with pytest.raises(judge.Wrong, match=DEFECTS[defect]):
        judge.checkpoint(tmp_path / "other")


@pytest.mark.parametrize("defect", [lost_key, wrong_shape, swapped_blocks, swapped_shards])
def test_stock_pytorch_is_compared_with_what_there_should_be(
    defect: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """And not with what pyckpt reads."""
    import pyckpt
    from torture import judge
    from torture.scenarios import tree_of

    tree = tree_of(VALUE)
    defect(tree["model"])
    pyckpt.save(tree, tmp_path / "other")
    assert isinstance(judge._as_stock_reads(tmp_path / "other"), str)


@pytest.mark.parametrize("defect", [lost_key, swapped_blocks, of_another_save])
def test_a_defect_of_an_export_is_seen(
    defect: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    import pyckpt
    from torture import judge
    from torture.scenarios import tree_of

    for name in ("sound", "other"):
        tree = tree_of(VALUE)
        if name == "other":
            defect(tree["model"])
        pyckpt.save(tree, tmp_path / name)
        pyckpt.export(tmp_path / name, tmp_path / f"{name}-export", max_shard_size="64KB")
    assert judge.exported(tmp_path / "sound-export") == VALUE
    with pytest.raises(judge.Wrong, match=DEFECTS[defect]):
        judge.exported(tmp_path / "other-export")


def test_what_was_not_loaded_is_no_value() -> None:
    from torture.scenarios import tree_of, value_of

    assert isinstance(value_of(tree_of(0)), str)
    tree = tree_of(VALUE)
    tree["object"]["value"] = VALUE + 1
    assert value_of(tree) == f"not value {VALUE}: object.value is {VALUE + 1}"


def test_nodes_have_one_metadata_and_one_note_of_their_part(tmp_path: Path) -> None:
    import pyckpt
    from torture import judge
    from torture.scenarios import tree_of

    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    step, older = "run/step-00000002", "run/step-00000001"

    def found(*, is_over: bool = True) -> dict[int, int]:
        return judge.whole_node_local_run(disks, tmp_path / "whole", is_over=is_over)

    for disk in disks:
        (disk / "run").mkdir(parents=True)
    pyckpt.save(tree_of(VALUE), disks[0] / step)
    (disks[1] / step).mkdir()
    metadata = (disks[0] / step / ".metadata").read_bytes()
    (disks[1] / step / ".metadata").write_bytes(metadata)
    assert found() == {2: VALUE}

    # Node 0 has removed its part of an older one; node 1 has not come to that.
    (disks[1] / older).mkdir()
    (disks[1] / older / ".metadata").write_bytes(metadata)
    assert found(is_over=False) == {2: VALUE}
    with pytest.raises(judge.Wrong, match="step-00000001: damaged"):
        found()
    (disks[1] / older).rename(disks[1] / "run/step-00000003")
    with pytest.raises(judge.Wrong, match="step-00000003: damaged"):
        found(is_over=False)
    (disks[1] / "run/step-00000003" / ".metadata").unlink()

    (disks[1] / step / ".metadata").write_bytes(metadata + b" ")
    with pytest.raises(judge.Wrong, match="another node"):
        found()

    (disks[0] / step / ".part.1").touch()
    assert judge.strays(disks[0] / step, run=False, node=True) == []
    assert judge.strays(disks[0] / step, run=False) == [".part.1"]
    (disks[0] / step / ".part.2").touch()
    assert len(judge.strays(disks[0] / step, run=False, node=True)) == 2
