"""Train a small GPT on the text of Python's own library, saving as it goes.

    python examples/train.py --checkpoints out/checkpoints
    python examples/train.py --checkpoints out/checkpoints --resume

Nothing here is special to pyckpt but one line, the `storage_writer` of `dcp.async_save`. Resuming
is plain `torch.distributed.checkpoint`, and does not import pyckpt.

One JSON line is printed for each step, save and resume. Losses are printed as hexadecimal floats,
which are exact, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

# A single process is what this script wants; DCP warns about it at each save and load.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

VOCABULARY = 256  # one token is one byte
WIDTH = 384
HEADS = 6
LAYERS = 5
CONTEXT = 48
BATCH = 16
LEARNING_RATE = 1e-3
WARMUP_STEPS = 10


# ---------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """About 9 million parameters; with the two moments of AdamW, a state of 109 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._initialise)
        # Bytes that differ clearly from the start: worth half a nat in so short a run.
        nn.init.normal_(self.token.weight, std=0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# ----------------------------------------------------------------------------------------- data


def load_text() -> Tensor:
    """The top-level modules of the standard library, end to end, as a tensor of bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    if len(text) < 100_000:
        raise SystemExit(f"too little Python source to train on in {library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(step: int, text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The batch is a function of the step alone, so a resumed run has no loader to restore."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth; a function of the step, as the batch is."""
    if step <= WARMUP_STEPS:
        return LEARNING_RATE * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


# ---------------------------------------------------------------------------------- checkpoints


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What is saved, and the template of what is loaded.

    `get_optimizer_state_dict` creates the moments of an optimizer that has not stepped yet. The
    empty `optimizer.state_dict()` of a fresh one would make `dcp.load` restore nothing, silently.
    """
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": step,
    }


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest committed one: `.metadata` is written last, so without it a save is not one."""
    return max((path.parent for path in directory.glob("step-*/.metadata")), default=None)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    started = time.perf_counter()
    state = training_state(model, optimizer, step=0)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    log(
        event="resume",
        path=str(path),
        step=state["step"],
        seconds=time.perf_counter() - started,
        pyckpt_imported="pyckpt" in sys.modules,
    )
    return int(state["step"])


def writer_class(kind: str) -> Callable[[Path], StorageWriter]:
    if kind == "stock":
        return dcp.FileSystemWriter
    import pyckpt  # here and not above, so that resuming is seen to do without it

    return pyckpt.DirectWriter


class BackgroundSave:
    """One asynchronous save, with the time that it blocked training and the time to its commit."""

    def __init__(self, writer: StorageWriter, path: Path, state: dict[str, Any]) -> None:
        self.writer, self.path, self.step = writer, path, state["step"]
        started = time.perf_counter()
        response = dcp.async_save(state, storage_writer=writer)
        self.blocked_seconds = time.perf_counter() - started
        self.committed_seconds = math.nan
        self._future: Future[Any] = (
            response if isinstance(response, Future) else response.upload_completion
        )

        self._ended = threading.Event()

        # The time is taken by the thread that commits: wait() may be called many steps later.
        def committed(_: Future[Any]) -> None:
            self.committed_seconds = time.perf_counter() - started
            self._ended.set()

        self._future.add_done_callback(committed)

    def wait(self) -> None:
        """Return when the checkpoint is committed; raise what made it fail."""
        self._ended.wait()  # a future has its result a moment before it calls back
        self._future.result()
        statistics = getattr(self.writer, "statistics", None)  # DirectWriter has them
        log(
            event="save",
            step=self.step,
            writer=type(self.writer).__name__,
            blocked_seconds=self.blocked_seconds,
            committed_seconds=self.committed_seconds,
            bytes=sum(file.stat().st_size for file in self.path.glob("*.distcp")),
            direct=statistics is not None and statistics.direct,
        )


# ------------------------------------------------------------------------------------- training


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    if args.threads:  # sums are split by thread, so equal losses need equal thread counts
        torch.set_num_threads(args.threads)

    text = load_text()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    log(event="start", parameters=sum(p.numel() for p in model.parameters()), text_bytes=len(text))

    first = 1
    if args.resume and (checkpoint := newest_checkpoint(args.checkpoints)):
        first = resume(checkpoint, model, optimizer) + 1

    main_writer, compared_writer = writer_class(args.writer), writer_class("stock")
    save: BackgroundSave | None = None
    for step in range(first, args.steps + 1):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        inputs, targets = batch_of(step, text, args.seed)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(
            event="step",
            step=step,
            loss=float(loss.item()).hex(),
            seconds=time.perf_counter() - started,
        )

        # The two writers take turns, half a period apart: both save from the same training loop,
        # and neither shares the disk or the processor with the other.
        writer, directory = main_writer, args.checkpoints
        if args.compare and (step + args.save_every // 2) % args.save_every == 0:
            writer, directory = compared_writer, args.compare
        elif step % args.save_every:
            continue
        if save:
            save.wait()
        # Zero padding makes the order of names the order of steps.
        path = directory / f"step-{step:06d}"
        save = BackgroundSave(writer(path), path, training_state(model, optimizer, step))

    if save:
        save.wait()
    log(event="end", digest=digest(training_state(model, optimizer, args.steps)))


def digest(state: Any) -> str:
    """One hash over every bit of a state: equal digests are equal weights, moments and settings."""
    hasher = hashlib.sha256()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                visit(value[key], f"{path}/{key}")
        elif isinstance(value, Tensor):
            hasher.update(f"{path} {value.dtype} {tuple(value.shape)}\n".encode())
            hasher.update(value.detach().contiguous().numpy().data)
        else:
            hasher.update(f"{path} {value!r}\n".encode())

    visit(state, "")
    return hasher.hexdigest()


def log(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the text of Python's own library."
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=8, metavar="STEPS")
    parser.add_argument(
        "--writer",
        choices=("direct", "stock"),
        default="direct",
        help="pyckpt.DirectWriter, or the FileSystemWriter of torch",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        help="save there with FileSystemWriter too, half-way between the other saves",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest committed checkpoint, if there is one",
    )
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
