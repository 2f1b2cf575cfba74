"""Train a small GPT on the text of Python's own library, saving as it goes.

    python examples/train.py --checkpoints out/checkpoints
    python examples/train.py --checkpoints out/checkpoints --resume

All that has to do with checkpoints is in `train`: a `pyckpt.Checkpointer`, its `restore`, and its
`step`. Stop it with SIGTERM, or kill it, and resume.

One JSON line is printed for each step, save and resume. Losses are printed as hexadecimal floats,
which are exact, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.nn import functional as F

import pyckpt

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


class SaveLog:
    """Prints one line for each save, when it is committed."""

    def __init__(self) -> None:
        self._last: pyckpt.SaveHandle | None = None

    def add(self, handle: pyckpt.SaveHandle) -> None:
        self.flush()
        self._last = handle

    def flush(self) -> None:
        """Wait for the last save; raise what made it fail."""
        handle, self._last = self._last, None
        if handle is None:
            return
        path = handle.wait()
        statistics = handle.statistics
        log(
            event="save",
            step=handle.step,
            writer="Checkpointer",
            blocked_seconds=statistics.blocked_seconds,
            committed_seconds=statistics.committed_seconds,
            bytes=data_bytes(path),
            direct=statistics.write is not None and statistics.write.direct,
        )


def save_with_stock(state: dict[str, Any], directory: Path, step: int) -> None:
    """The same state, as plain PyTorch saves it: for comparison. Waits until it is committed."""
    path = directory / f"step-{step:08d}"
    started = time.perf_counter()
    response = dcp.async_save(
        {
            "model": get_model_state_dict(state["model"]),
            "optimizer": get_optimizer_state_dict(state["model"], state["optimizer"]),
        },
        storage_writer=dcp.FileSystemWriter(path),
    )
    blocked_seconds = time.perf_counter() - started
    future = response if isinstance(response, Future) else response.upload_completion

    def committed(future: Future[Any]) -> None:
        if future.exception() is None:
            log(
                event="save",
                step=step,
                writer="FileSystemWriter",
                blocked_seconds=blocked_seconds,
                committed_seconds=time.perf_counter() - started,
                bytes=data_bytes(path),
                direct=False,
            )

    # The time is taken by the thread that commits.
    future.add_done_callback(committed)
    STOCK_SAVES.append(future)


STOCK_SAVES: list[Future[Any]] = []


def data_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


# ------------------------------------------------------------------------------------- training


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    if args.threads:  # sums are split by thread, so equal losses need equal thread counts
        torch.set_num_threads(args.threads)

    text = load_text()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    state = {"model": model, "optimizer": optimizer}
    log(event="start", parameters=sum(p.numel() for p in model.parameters()), text_bytes=len(text))

    saves = SaveLog()
    with pyckpt.Checkpointer(
        args.checkpoints,
        every_steps=args.save_every,
        keep_last=args.keep_last,
        on_signals=("SIGTERM",),
        when_busy="wait",  # the demo counts on every save
    ) as checkpointer:
        started = time.perf_counter()
        first = (checkpointer.restore(state) or 0) + 1 if args.resume else 1
        if first > 1:
            log(event="resume", step=first - 1, seconds=time.perf_counter() - started)
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
            # The two take turns, half a period apart: both save from the same training loop, and
            # neither shares the disk or the processor with the other.
            if args.compare and (step + args.save_every // 2) % args.save_every == 0:
                saves.flush()
                save_with_stock(state, args.compare, step)
            elif step % args.save_every == 0:
                wait(STOCK_SAVES)
            handle = checkpointer.step(step, state)
            if handle is not None:
                saves.add(handle)
            if checkpointer.stop_requested:
                break
        saves.flush()
        for future in STOCK_SAVES:
            future.result()
        log(event="statistics", text=str(checkpointer.statistics))
    weights = get_model_state_dict(model)
    moments = get_optimizer_state_dict(model, optimizer)
    log(event="end", digest=digest({"model": weights, "optimizer": moments}))


def digest(state: Any) -> str:
    """One hash over every bit of a state: equal digests are equal weights, moments and settings."""
    hasher = hashlib.sha256()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                visit(value[key], f"{path}/{key}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                visit(item, f"{path}/{number}")
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
        "--keep-last", type=int, metavar="N", help="checkpoints to keep (default: all)"
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
        help="continue from the newest valid checkpoint, if there is one",
    )
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
