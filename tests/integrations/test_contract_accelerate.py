"""What `pyckpt.integrations.accelerate` uses of Accelerate besides its documentation. A test that
fails here names what a release has changed."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

ATTRIBUTES = [
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
    "scaler",
    "step",
    "project_configuration",
]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_the_accelerator(name: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    assert hasattr(accelerator, name), f"Accelerator has no {name} any more"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("save_state", ["output_dir", "safe_serialization", "save_model_func_kwargs"]),
        ("load_state", ["input_dir", "load_kwargs", "load_model_func_kwargs"]),
        ("prepare_data_loader", ["data_loader", "device_placement", "slice_fn_for_dispatch"]),
        ("skip_first_batches", ["dataloader", "num_batches"]),
        ("end_training", []),
    ],
)
def test_methods_of_the_accelerator(name: str, arguments: list[str]) -> None:
    method = getattr(accelerate.Accelerator, name, None)
    assert method is not None, f"Accelerator has no {name} any more"
    assert list(inspect.signature(method).parameters)[1:] == arguments


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_prepared_loader_asks_its_own_loader_for_an_iterator(kind: Any) -> None:
    # As an attribute of the object, of which the integration takes the place.
    assert "self.base_dataloader.__iter__()" in inspect.getsource(kind.__iter__)


def test_a_prepared_loader_is_a_batch_ahead() -> None:
    # The integration takes one off when it counts the examples that were used.
    accelerator = accelerate.Accelerator(cpu=True)
    fetched: list[int] = []

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            fetched.append(i)
            return i

    loader = accelerator.prepare(torch.utils.data.DataLoader(Data(), batch_size=1))
    assert isinstance(loader, DataLoaderShard)
    assert loader.total_batch_size == 1
    assert [len(fetched) for _ in loader] == [2, 3, 3]


def test_a_prepared_loader_counts_its_epochs() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader([1, 2], batch_size=1))
    found = [(loader.iteration, loader.end_of_dataloader) for _ in loader]
    assert found == [(0, False), (0, True)]
    assert (loader.iteration, loader.end_of_dataloader) == (1, True)
    loader.set_epoch(5)
    assert loader.iteration == 5
