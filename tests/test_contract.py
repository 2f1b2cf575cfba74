"""What pyckpt expects of names of torch that are private, or that torch does not document.

A torch that breaks one of them fails here, and the failure says which torch, which name, and what
pyckpt needs it for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import pyckpt
from pyckpt import private
from pyckpt.dcp import sharded_tensors
from pyckpt.dcp.save_planner import SavePlanner

DCP = "torch.distributed.checkpoint"
SHARD = "torch.distributed._shard"

# Module, name, the parameters that we pass (None: it is not called), and what it is for.
CONTRACT: list[tuple[str, str, tuple[str, ...] | None, str]] = [
    (f"{DCP}.filesystem", "CURRENT_DCP_VERSION", None, "metadata says which DCP wrote it"),
    (
        f"{DCP}.filesystem",
        "_StorageInfo",
        ("relative_path", "offset", "length"),
        "metadata says where items lie, in stock's class",
    ),
    (f"{DCP}._extension", "ExtensionRegistry", None, "items that stock compressed are read"),
    (
        f"{DCP}.utils",
        "_DistWrapper",
        ("group", "use_dist", "coordinator_rank"),
        "ranks take steps in which all fail if one does",
    ),
    (f"{DCP}.utils", "find_tensor_shard", ("tensor", "index"), "an item's memory is found"),
    (
        f"{DCP}.state_dict_loader",
        "_load_state_dict",
        ("state_dict", "storage_reader", "process_group", "no_dist", "planner"),
        "pyckpt.load loads without the warning of dcp.load",
    ),
    (
        f"{DCP}.state_dict_saver",
        "_save_state_dict",
        ("state_dict", "storage_writer", "process_group", "no_dist", "planner"),
        "pyckpt.save saves without the warning of dcp.save",
    ),
    (f"{DCP}.planner_helpers", "_create_chunk_list", ("tensor",), "a load knows its own chunks"),
    (
        f"{DCP}.planner_helpers",
        "create_read_items_for_chunk_list",
        ("fqn", "checkpoint_md", "local_chunks"),
        "a load reads the parts of saved chunks that it needs",
    ),
    (
        f"{SHARD}._utils",
        "narrow_tensor_by_index",
        ("tensor", "offsets", "sizes"),
        "a part of a tensor is loaded",
    ),
    (
        "torch.distributed._functional_collectives",
        "AsyncCollectiveTensor",
        None,
        "the local part of a DTensor may be on its way",
    ),
    # Of ShardedTensor's world.
    (
        f"{DCP}._sharded_tensor_utils",
        "_flatten_sharded_tensors",
        ("state_dict",),
        "FSDP1 in two dimensions is loaded",
    ),
    (f"{SHARD}.metadata", "ShardMetadata", None, "copies of a ShardedTensor are placed"),
    (f"{SHARD}.sharded_tensor.api", "ShardedTensor", None, "a ShardedTensor is copied"),
    (f"{SHARD}.sharded_tensor.shard", "Shard", ("tensor", "metadata"), "its shards are copied"),
    ("torch.distributed.remote_device", "_remote_device", None, "its copies say where they are"),
    # What objects.py reads saved objects with.
    ("torch.serialization", "_load", None, "objects are loaded without running code"),
    ("torch.serialization", "_open_zipfile_reader", None, "objects are loaded"),
    ("torch._weights_only_unpickler", "_get_allowed_globals", (), "what objects may name is known"),
    (
        "torch._weights_only_unpickler",
        "_get_user_allowed_globals",
        (),
        "what the program allows is known",
    ),
    (
        "torch._weights_only_unpickler",
        "get_globals_in_pkl",
        ("file",),
        "what an object names that is not allowed is told",
    ),
]


def broken(what: str, purpose: str) -> str:
    return f"torch {torch.__version__} {what}, which pyckpt needs so that {purpose}"


@pytest.mark.parametrize(("module", "name", "parameters", "purpose"), CONTRACT)
def test_name(module: str, name: str, parameters: tuple[str, ...] | None, purpose: str) -> None:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(broken(f"has no {module}.{name}", purpose))
    if parameters is None:
        return
    takes = tuple(inspect.signature(found).parameters)
    missing = [parameter for parameter in parameters if parameter not in takes]
    assert not missing, broken(f"has a {module}.{name}{takes} without {missing}", purpose)
    # We pass the first by position.
    assert takes[:1] == parameters[:1], broken(f"has a {module}.{name}{takes}", purpose)


def private_imports(path: Path) -> set[tuple[str, str]]:
    """The names of torch with a leading underscore, in them or in their module, that a module of
    ours imports."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed")
        for alias in node.names
        if node.module is not None
        and "_" in {part[0] for part in f"{node.module}.{alias.name}".split(".")}
    }


def test_each_private_name_has_one_place_and_a_line_here() -> None:
    known = {(module, name) for module, name, *_ in CONTRACT}
    root = Path(pyckpt.__file__).parent
    homes = {Path(str(module.__file__)) for module in (private, sharded_tensors)}
    for path in root.rglob("*.py"):
        found = private_imports(path)
        if path in homes:
            found.discard((f"{DCP}.protocol", "_is_checkpointable_tensor"))  # of torch 2.15
            assert found <= known, f"{path} uses names that this test does not know"
        else:
            assert not found, f"{path} uses names of torch that belong into {private.__name__}"


def test_what_a_save_is_planned_by() -> None:
    """DirectWriter looks at the variables of the function of DCP that calls it."""
    names = private.state_dict_saver._save_state_dict.__code__
    for name in ("storage_writer", "planner"):
        assert name in names.co_varnames + names.co_cellvars, broken(
            f"has no variable {name} in _save_state_dict", "planners that change tensors are known"
        )


def test_stock_calls_what_we_override() -> None:
    for name in ("_create_global_plan", "_dedup_save_plans"):
        assert hasattr(DefaultSavePlanner, name), broken(
            f"has no DefaultSavePlanner.{name}", "replicas keep writing what they staged"
        )
    called: list[str] = []

    class Looks(SavePlanner):
        def _dedup_save_plans(self, all_plans: Any) -> Any:
            called.append("_dedup_save_plans")
            return super()._dedup_save_plans(all_plans)

    planner = Looks()
    planner.set_up_planner({"a": torch.rand(3)}, is_coordinator=True)
    planner.create_global_plan([planner.create_local_plan()])
    assert called, broken("does not call _dedup_save_plans", "replicas keep what they staged")


def test_an_override_of_what_is_gone_says_so() -> None:
    class Base:
        def still_there(self) -> None: ...

    def still_there(self: Any) -> None: ...

    def gone(self: Any) -> None: ...

    assert private.overrides(Base, so_that="it works")(still_there) is still_there
    with pytest.raises(ImportError, match=rf"torch {torch.__version__.split('+')[0]}.*Base\.gone"):
        private.overrides(Base, so_that="it works")(gone)
