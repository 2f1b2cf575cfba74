"""The names of Lightning that are used and not promised: a release that lacks one is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _lightning import Module, trainer
from lightning.pytorch import Callback


def test_what_the_callback_and_the_strategies_count_on(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    class See(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loop = trainer.fit_loop
            found["fetcher"] = loop._data_fetcher
            found["states"] = loop.state_dict()
            found["progress"] = loop.epoch_progress.current
            found["restarting"] = loop.epoch_loop.restarting
            found["flag"] = loop._restarting
            epoch = loop.epoch_loop
            found["last"] = (epoch._should_accumulate(), epoch._num_ready_batches_reached())
            found["validates"] = epoch._should_check_val_fx(loop._data_fetcher)
            found["batches"] = (loop.batch_idx, loop.total_batch_idx, trainer.is_last_batch)

    trainer(tmp_path, See(), enable_checkpointing=False, limit_train_batches=2, epochs=1).fit(
        Module()
    )
    assert iter(found["fetcher"]) is found["fetcher"]
    assert set(found["states"]["state_dict"]) == {"combined_loader"}
    assert {"ready", "completed", "processed"} <= set(found["states"]["epoch_progress"]["current"])
    assert found["restarting"] is False
    assert found["flag"] is False
    assert found["last"] == (False, True)
    assert found["validates"] is False
    assert found["batches"] == (1, 1, True)
