"""Train with a mirror in a bucket, lose the machine and its disk, and go on from the bucket.

    python examples/lost_disk.py [URL]

Trains with checkpoints on the local disk, which a thread brings to the bucket at URL
(s3://bucket/run, or file:///a/directory; by default a bucket of a server that this script starts:
moto's, pip install "moto[server]"). Kills the training with SIGKILL once the bucket has a
checkpoint, removes the local directory, and starts the training again: it resumes from the bucket.
The losses and the final weights must be those of a run that nothing interrupted, bit for bit. The
exit status is 0 only if they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

SAVE_EVERY = 5
MORE_STEPS = 20


def train(directory: str, mirror: str, steps: int) -> None:
    """The training loop. ``mirror`` may be empty."""
    import torch
    from torch import nn

    import pyckpt

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "rng": pyckpt.RngState()}
    with pyckpt.Checkpointer(
        directory,
        every_steps=SAVE_EVERY,
        keep_last=1,
        when_busy="wait",
        mirror=mirror or None,
        mirror_keep_last=2 if mirror else None,
    ) as checkpointer:
        start = checkpointer.restore(state) or 0
        print(f"start {start}", flush=True)
        for step in range(start + 1, steps + 1):
            batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(step, state)
            there = checkpointer.statistics.mirror
            in_mirror = 0 if there is None else there.last_step or 0
            print(f"step {step} loss {loss.item().hex()} mirror {in_mirror}", flush=True)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)


def start(directory: Path, mirror: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--train", str(directory), mirror, str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_once_mirrored(directory: Path, mirror: str) -> tuple[int, int]:
    """Returns the last step of the training, and that of the bucket's checkpoint."""
    training = start(directory, mirror, 1_000_000)
    assert training.stdout is not None
    try:
        for line in training.stdout:
            words = line.split()
            if words[0] == "step" and 0 < int(words[5]) < int(words[1]):
                return int(words[1]), int(words[5])
    finally:
        training.kill()
        training.communicate()
    raise SystemExit(f"the training ended by itself, with status {training.returncode}")


def run_to_the_end(directory: Path, mirror: str, steps: int) -> tuple[int, dict[int, str], str]:
    """Returns the step that it resumed from, the loss of each step, and a hash of the weights."""
    training = start(directory, mirror, steps)
    output, _ = training.communicate()
    if training.returncode:
        raise SystemExit(f"the training failed, with status {training.returncode}")
    lines = [line.split() for line in output.splitlines()]
    first = next(int(words[1]) for words in lines if words[0] == "start")
    losses = {int(words[1]): words[3] for words in lines if words[0] == "step"}
    return first, losses, lines[-1][1]


@contextlib.contextmanager
def bucket_of_our_own() -> Iterator[str]:
    """A bucket of moto's S3 server, in this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ.update(
            AWS_ACCESS_KEY_ID="example",
            AWS_SECRET_ACCESS_KEY="example",
            AWS_REGION="us-east-1",
            AWS_ALLOW_HTTP="true",
            AWS_ENDPOINT_URL=f"http://{host}:{port}",
        )
        request = urllib.request.Request(f"http://{host}:{port}/runs", method="PUT")
        urllib.request.urlopen(request).close()
        yield "s3://runs/example"
    finally:
        server.stop()


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise SystemExit(f"NOT SO: {claim}")
    print(f"{claim}")


def demonstrate(mirror: str, scratch: Path) -> None:
    local = scratch / "local"
    last, mirrored = kill_once_mirrored(local, mirror)
    print(f"killed at step {last}; the bucket has the checkpoint of step {mirrored}")
    shutil.rmtree(local)
    print("removed the local directory")
    resumed_at, losses, weights = run_to_the_end(local, mirror, last + MORE_STEPS)
    check(resumed_at >= mirrored, f"resumed from step {resumed_at}, out of the bucket")
    _, expected, expected_weights = run_to_the_end(scratch / "undisturbed", "", last + MORE_STEPS)
    same = losses == {step: loss for step, loss in expected.items() if step > resumed_at}
    check(bool(losses) and same, f"{len(losses)} losses are those of a run without a break")
    check(weights == expected_weights, "so are the final weights, bit for bit")


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        directory, mirror, steps = sys.argv[2:]
        train(directory, mirror, int(steps))
        return
    given = contextlib.nullcontext(sys.argv[1]) if sys.argv[1:] else bucket_of_our_own()
    with tempfile.TemporaryDirectory(prefix="pyckpt-tiers-") as scratch, given as mirror:
        demonstrate(mirror, Path(scratch))


if __name__ == "__main__":
    main()
