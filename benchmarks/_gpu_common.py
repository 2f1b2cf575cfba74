"""Where `gpu.py` runs, how large, and the model that it trains."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _common import MIB, Report, Sample, State, Variant, WrongBytes, interleave, remove
from _savers import Saver, Stock, StockDefaultStager, TorchCheckpointing
from torch import Tensor, nn
from torch.nn import functional

GIB = 1 << 30

OURS = "pyckpt"
BARE = "bare pinned copy"
BESIDE = " beside "
"""Between the name of a group and that of the peer that was measured beside the bare copy."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    staging_bytes: int
    large_tensors: int = 128
    small_tensors: int
    small_tensor_bytes: int = 16 << 10
    storage_bytes: int
    offload_bytes: int
    attempt_bytes: int
    """Of a state whose copy must still be on its way when the state is overwritten."""
    attempts: int
    rounds: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    micro_batches: int
    """Of a step. Together they must take longer than the copies of the state, as in training of
    such a model: the next change of the state waits for these."""
    steps: int
    """Between one save and the next."""
    parameters: int
    """Of the optimizer with many."""
    busy_tensors: int = 3000
    """More than a stream takes operations that wait, in memory of three quarters of
    ``staging_bytes`` at most."""
    busy_tensor_bytes: int = 4 * MIB


SMOKE = Scale(
    staging_bytes=2 * MIB,
    large_tensors=4,
    small_tensors=50,
    small_tensor_bytes=1000,
    storage_bytes=2 * MIB,
    offload_bytes=1 * MIB,
    attempt_bytes=1 * MIB,
    attempts=1,
    rounds=1,
    layers=1,
    width=32,
    heads=2,
    vocabulary=64,
    context=16,
    batch=2,
    micro_batches=2,
    steps=2,
    parameters=5,
    busy_tensors=20,
    busy_tensor_bytes=1000,
)


def scale_of(device: torch.device) -> Scale:
    """What fits this GPU and this host, up to a state of 16 GiB and a model of 1.4 billion
    parameters."""
    free, _ = torch.cuda.mem_get_info(device)
    host = available_memory()
    # Ours, DefaultStager's and the bare copy's pinned memory are there at a time, and page cache.
    staging = min(16 * GIB, free // 4, host // 8)
    # Parameters, gradients and AdamW's state in float32, of which all but the gradients are saved
    # three times in host memory; activations beside them.
    parameters = min(free // 40, host // 60)
    width = 2048
    layers = max(2, min(24, (parameters - 50304 * width) // (12 * width**2)))
    return Scale(
        staging_bytes=staging // MIB * MIB,
        small_tensors=20_000,
        storage_bytes=min(3 * GIB, staging),
        offload_bytes=min(4 * GIB, staging),
        attempt_bytes=min(GIB, staging),
        attempts=5,
        rounds=5,
        layers=layers,
        width=width,
        heads=16,
        vocabulary=50304,
        context=1024,
        batch=4,
        # 17 GB at 50 GB/s are 0.34 s, and 4,096 tokens of that model some 0.1 s.
        micro_batches=6,
        steps=8,
        parameters=300,
    )


def shared_memory_free() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def files_at_most() -> int:
    """How many a process may have open and mapped."""
    try:
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:  # a sandbox's kernel may not say
        mappings = 65530
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return mappings if files == resource.RLIM_INFINITY else min(files, mappings)


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


@dataclass
class Setting:
    """What every section is given. Without CUDA the same code runs on CPU tensors, as a test of
    itself: it measures nothing."""

    report: Report
    directory: Path
    device: torch.device
    scale: Scale
    deadline: float
    """By ``time.monotonic``: what does not fit before it is left out, with a note."""
    traces: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Step times of training, for the plots: saver -> phase -> milliseconds."""
    _rival: TorchCheckpointing | None = None
    _rival_was_tried: bool = False

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def path(self) -> Path:
        return self.directory / "checkpoint"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def synchronize_stream(self) -> None:
        """Wait for what the program computes, and not for copies on other streams."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def busy(self, milliseconds: float) -> BusyStream:
        return BusyStream(self, milliseconds)

    def side_stream(self) -> AbstractContextManager[Any]:
        """A stream of its own, ordered behind the current one; the current one is ordered behind it
        at the end."""
        return _side_stream() if self.cuda else nullcontext()

    def sleep(self, milliseconds: float) -> None:
        """Keep the current stream busy for about so long; the host goes on."""
        if self.cuda:
            torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]

    def empty_cache(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()

    def time_for(self, seconds: float, what: str) -> bool:
        """Whether there is time for something that takes about so long."""
        left = self.deadline - time.monotonic()
        if seconds <= left:
            return True
        self.report.note(f"left out for want of time ({left:.0f} s are left): {what}")
        return False

    def measure(
        self,
        group: str,
        variants: Sequence[Variant],
        *,
        title: str,
        rounds: int,
        before: Callable[[], None],
        quiet: bool = True,
        spare: float = 0.0,
    ) -> None:
        """`interleave` into the report: what there is after each round, until no more than
        ``spare`` seconds are left."""
        interleave(
            variants,
            rounds,
            before=before,
            console=self.report.console,
            title=title,
            quiet=quiet,
            deadline=self.deadline - spare,
            after_round=lambda samples: self.report.add(group, samples),
            peer_failed=self.note_failure,
        )

    def note_failure(self, who: str, error: BaseException) -> None:
        """Of a peer: it says nothing of ours."""
        lines = str(error).strip().splitlines() or [""]
        text = f"{who} failed, and was left out from there: {type(error).__name__}: {lines[0]}"
        # Brackets of an exception are no markup.
        self.report.note(text.replace("[", "("))

    def rival(self) -> TorchCheckpointing | None:
        """torch_checkpointing, where it is installed and can save here."""
        if not self._rival_was_tried:
            self._rival_was_tried = True
            reason = "torch_checkpointing: not in a walk through the code"
            if self.cuda:
                self._rival, reason = TorchCheckpointing.where_it_runs(self.directory, cuda=True)
            if self._rival is None:
                self.report.note(f"left out: {reason}")
        return self._rival

    def shared_memory_for(self, nbytes: int, tensors: int, who: str) -> bool:
        """Whether /dev/shm has room for a copy of so many bytes, and this process for as many
        mapped files as tensors. To write beyond the end of /dev/shm is death by SIGBUS."""
        free, files = shared_memory_free(), files_at_most()
        if nbytes * 5 // 4 >= free:
            why = f"/dev/shm has {free / 1e9:.1f} GB free for a state of {nbytes / 1e9:.1f} GB"
        # A copy may be there twice: the last one, and the next.
        elif tensors * 22 // 10 + 200 >= files:
            why = f"a process may have {files:,} files, and each of {tensors:,} tensors takes one"
        else:
            return True
        self.report.note(f"{who}: without shared memory: {why}")
        return False

    def beside(
        self,
        nbytes: int,
        tensors: int,
        what: str,
        seconds: float,
        measure: Callable[[Saver], None],
        *,
        known_first: bool = False,
    ) -> None:
        """Measure each peer, with all that this device offers for a state of so many bytes and
        tensors: made when its turn comes, if ``seconds`` are left, and closed after it. What it
        raises is noted. What most programs use comes last, or with ``known_first`` first."""
        peers = self._peers(nbytes, tensors)
        for name, make in reversed(peers) if known_first else peers:
            if not self.time_for(seconds, f"{what} by {name}"):
                continue
            peer: Saver | None = None
            try:
                peer = make()
                if peer is not None:
                    measure(peer)
            except Exception as error:
                self.note_failure(f"{what}: {name}", error)
            finally:
                try:
                    if peer is not None and peer is not self._rival:
                        peer.close()
                    remove(self.path)
                except Exception as error:
                    self.note_failure(f"{what}: {name}, at its end", error)

    def _peers(self, nbytes: int, tensors: int) -> list[tuple[str, Callable[[], Saver | None]]]:
        def default() -> Saver:
            shared = self.shared_memory_for(nbytes, tensors, StockDefaultStager.name)
            return StockDefaultStager(cuda=self.cuda, shared_memory=shared)

        def rival() -> Saver | None:
            # It saves from another process, and so from shared memory alone.
            if not self.shared_memory_for(2 * nbytes, tensors, TorchCheckpointing.name):
                return None
            return self.rival()

        return [
            (StockDefaultStager.name, default),
            (TorchCheckpointing.name, rival),
            (Stock.name, Stock),
        ]

    def close(self) -> None:
        if self._rival is not None:
            self._rival.close()


class BusyStream:
    """Keeps the current stream busy, from now on for about so long. A walk without a GPU has none:
    it always goes on."""

    def __init__(self, setting: Setting, milliseconds: float) -> None:
        self._events: list[Any] = []
        if setting.cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
            setting.sleep(milliseconds)
            self._events[1].record()

    def goes_on(self) -> bool:
        return not self._events or not self._events[1].query()

    def seconds(self) -> float:
        """How long that was. Waits for it."""
        if not self._events:
            return 0.0
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end) / 1e3)


@contextmanager
def _side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    stream.wait_stream(current)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)  # type: ignore[no-untyped-call]


# --- states -----------------------------------------------------------------------------------


def tensors_of(setting: Setting, count: int, nbytes: int) -> State:
    """``count`` tensors of ``nbytes`` each, in allocations of their own, all different."""
    elements = max(1, nbytes // 4)
    return {
        "model": {
            f"weight.{i:05d}": torch.full((elements,), i, dtype=torch.int32, device=setting.device)
            for i in range(count)
        }
    }


def on_device(state: State, device: torch.device) -> State:
    """A copy of a state, for comparing."""
    return {
        group: {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for group, tensors in state.items()
    }


def must_equal_on_device(found: Any, expected: State, who: str) -> None:
    """Compare where the expected tensors are, which for a GPU's is faster, and wait once for each
    group only."""
    for group, tensors in expected.items():
        differ: list[Tensor] = []
        for name, tensor in tensors.items():
            other = found[group][name]
            if other.dtype != tensor.dtype or other.shape != tensor.shape:
                raise WrongBytes(f"{who}: {group}.{name} is not what was saved")
            differ.append((other.to(tensor.device) != tensor).any().cpu())
        if differ and torch.stack(differ).any():
            wrong = [name for name, one in zip(tensors, differ, strict=True) if one]
            raise WrongBytes(f"{who}: {group}: {len(wrong)} of {len(tensors)} wrong: {wrong[0]}")


def timed_on_device(setting: Setting, action: Callable[[], Any]) -> Sample:
    """Seconds until the device is through, and until the call returned."""
    setting.synchronize()
    start = time.perf_counter()
    action()
    returned = time.perf_counter() - start
    setting.synchronize()
    return {"seconds": time.perf_counter() - start, "blocked_seconds": returned}


# --- the model --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.heads = scale.heads
        self.norm_1 = nn.LayerNorm(scale.width)
        self.qkv = nn.Linear(scale.width, 3 * scale.width)
        self.out = nn.Linear(scale.width, scale.width)
        self.norm_2 = nn.LayerNorm(scale.width)
        self.up = nn.Linear(scale.width, 4 * scale.width)
        self.down = nn.Linear(4 * scale.width, scale.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + added


class GPT(nn.Module):
    """As in GPT-2, with a head of its own."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.tokens = nn.Embedding(scale.vocabulary, scale.width)
        self.positions = nn.Embedding(scale.context, scale.width)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(scale.layers))
        self.norm = nn.LayerNorm(scale.width)
        self.head = nn.Linear(scale.width, scale.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute: Callable[[], Tensor]
    """Forward and backward; returns the loss."""
    tokens: int
    """Of a step."""


def gpt_training(setting: Setting, scale: Scale) -> Training:
    """A GPT, AdamW, and a batch that stays the same, by micro-batches; bfloat16 by autocast."""
    torch.manual_seed(6)
    with setting.device:
        model = GPT(scale)
        batch = torch.randint(scale.vocabulary, (scale.batch, scale.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def compute() -> Tensor:
        optimizer.zero_grad()
        for _ in range(scale.micro_batches):
            with torch.autocast(setting.device.type, torch.bfloat16):
                logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / scale.micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss

    compute()
    optimizer.step()
    tokens = scale.batch * scale.context * scale.micro_batches
    return Training(model, optimizer, compute, tokens)
