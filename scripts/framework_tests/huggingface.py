"""Accelerate's tests of its Accelerator, and Transformers' of its Trainer."""

from __future__ import annotations

from scripts.framework_tests._common import Suite

__all__ = ["SUITES"]


def _swap_accelerator() -> None:
    import accelerate
    import accelerate.accelerator

    from pyckpt.integrations.accelerate import Accelerator

    accelerate.Accelerator = Accelerator
    accelerate.accelerator.Accelerator = Accelerator


SUITES = {
    "accelerate": Suite(
        package="accelerate",
        module=__name__,
        swap=_swap_accelerator,
        files=[
            "tests/test_state_checkpointing.py",
            "tests/test_accelerator.py",
            "tests/test_data_loader.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
        ],
    ),
}
