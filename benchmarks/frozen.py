"""What a save costs when most of the state is frozen: adapters on a base that does not change.

    python benchmarks/frozen.py [--quick]

- save: the call, the time to the commit and the bytes written, with `frozen=True`, with
  `watch_frozen=True`, too, and without; and of saving the adapters alone, which no save of both can
  be faster than.
- disk: what five checkpoints take.

The base is of --size-mib (default: 1024) in 16 layers. The adapters and their AdamW state are about
a hundredth of it. (Were the adapters alone a hundredth, five checkpoints would need 1.15 of a base
for what differs in them.)
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import MIB, Options, Report, Sample, Variant, interleave, run
from torch import nn

import pyckpt

LAYERS = 16
CHECKPOINTS = 5
REST_SECONDS = 1.0


class Adapted(nn.Module):
    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(size, rank, bias=False)
        self.lora_B = nn.Linear(rank, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return adapted


class Training:
    """Adapters on a base of about ``size`` bytes."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.width = 64 * max(1, round(math.sqrt(size / LAYERS / 4) / 64))
        rank = max(1, self.width // 600)
        self.model = nn.Sequential(*(Adapted(self.width, rank) for _ in range(LAYERS)))
        self.adapters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def changing(self) -> dict[str, Any]:
        """The state without the base."""
        adapters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        return {"adapters": adapters, "optimizer": self.optimizer.state_dict()}

    @property
    def base_bytes(self) -> int:
        return sum(one.nbytes for one in self.model.parameters() if not one.requires_grad)

    @property
    def changing_bytes(self) -> int:
        """Of the adapters and their state."""
        return 3 * sum(one.nbytes for one in self.adapters)

    def step(self) -> None:
        for one in self.adapters:
            one.grad = torch.randn_like(one)
        self.optimizer.step()


def disk_bytes(directory: Path) -> int:
    """What all files take, each inode once."""
    sizes = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            status = os.stat(Path(folder, name))
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def measure_save(report: Report, options: Options) -> None:
    training = Training(options.size)
    names = ["everything", "frozen parts linked", "linked and watched", "adapters alone"]
    steps = dict.fromkeys(names, 0)

    def saving(name: str, checkpointer: pyckpt.Checkpointer) -> Variant:
        def save() -> Sample:
            training.step()
            steps[name] += 1
            state = training.changing if checkpointer is alone else training.state
            handle = checkpointer.save(steps[name], state)
            handle.wait()
            statistics = handle.statistics
            assert statistics.write is not None
            return {
                "seconds": statistics.committed_seconds,
                "blocked_seconds": statistics.blocked_seconds,
                "bytes_written": float(statistics.write.bytes_written),
            }

        return Variant(name, save)

    def between() -> None:
        # Removing the checkpoint before, and reading what was linked, are no part of the next save;
        # nor is what the file system has to write for that.
        for checkpointer in (plain, linked, watched, alone):
            checkpointer._saver._thread.submit(bool).result()
        os.sync()
        # A device that takes a burst faster than it can go on is slow for a while after one.
        time.sleep(REST_SECONDS)

    plain = pyckpt.Checkpointer(options.directory / "plain", keep_last=1)
    linked = pyckpt.Checkpointer(options.directory / "linked", keep_last=1, frozen=True)
    watched = pyckpt.Checkpointer(
        options.directory / "watched", keep_last=1, frozen=True, watch_frozen=True
    )
    alone = pyckpt.Checkpointer(options.directory / "alone", keep_last=1)
    with plain, linked, watched, alone:
        samples = interleave(
            list(map(saving, names, (plain, linked, watched, alone))),
            options.rounds,
            before=between,
            console=report.console,
            title="save",
        )
    report.add("save", samples)
    report.table(
        f"A base of {training.base_bytes / MIB:,.0f} MiB, adapters and their state of "
        f"{training.changing_bytes / MIB:,.1f} MiB",
        "save",
        {
            "seconds": ("seconds to the commit", lambda seconds: seconds),
            "blocked_seconds": ("in the call", lambda seconds: seconds),
            "bytes_written": ("MB written", lambda size: size / 1e6),
            "cpu_seconds": ("CPU seconds", lambda seconds: seconds),
        },
    )
    written = report.median("save", names[1], "bytes_written")
    report.target(
        "bytes written, over the adapters and their state",
        None if written is None else written / training.changing_bytes,
        at_most=1.1,
        unit="x",
    )
    share = report.ratio("save", names[3], names[0])
    report.note(
        f"saving the adapters alone takes {share or math.nan:.2f} of saving everything; the rest "
        "of what a linking save takes is the hash of the base, or the look at its pages"
    )
    for name in names[1:3]:
        report.target(
            f"{name}: seconds to the commit, over those of saving everything",
            report.ratio("save", name, names[0]),
            at_most=0.1,
            unit="x",
        )


def measure_disk(report: Report, options: Options) -> None:
    training = Training(options.size)
    directory = options.directory / "five"
    with pyckpt.Checkpointer(directory, frozen=True) as checkpointer:
        for step in range(1, CHECKPOINTS + 1):
            training.step()
            checkpointer.save(step, training.state).wait()
        if not all(entry.state == "valid" for entry in checkpointer.inspect(verify=True)):
            raise SystemExit("a checkpoint is damaged")
    found = disk_bytes(directory)
    report.add("disk", {f"{CHECKPOINTS} checkpoints": [{"bytes": float(found)}]})
    report.target(
        f"bytes on disk of {CHECKPOINTS} checkpoints, over one base",
        found / training.base_bytes,
        at_most=1.1,
        unit="x",
    )


SECTIONS: dict[str, Any] = {"save": measure_save, "disk": measure_disk}

if __name__ == "__main__":
    sys.exit(run("frozen", SECTIONS, __doc__ or "", size_mib=1024))
