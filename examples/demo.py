"""Kill a training run in the middle of a save, resume it, and look for a difference.

    python examples/demo.py

Runs `train.py` three times: without interruption, then killed with SIGKILL while a checkpoint is
being written, then resumed, by `pyckpt.Checkpointer`, from the last one that is valid. The losses
must be those of the uninterrupted run bit for bit, and so must the final weights and moments. Stock
`dcp.load` must read the last checkpoint. The exit status is 0 only if every claim that is printed
was checked and holds.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _report import plot, saves_table
from _runs import (
    SAVE_EVERY,
    STEPS,
    Failed,
    Kill,
    Run,
    checkpoint_path,
    console,
    data_files,
    is_committed,
    run_to_the_end,
    train_and_kill,
)
from rich.markup import escape

# ------------------------------------------------------------------------------------- the claims


def check(holds: bool, claim: str, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)
    console.print(f"[green]✓[/] {escape(claim)}", highlight=False)


def check_kill(kill: Kill, directory: Path) -> None:
    files = data_files(kill.checkpoint)
    check(
        bool(files) and not is_committed(kill.checkpoint),
        f"SIGKILL hit the save of step {kill.step}: {kill.written / 1e6:.0f} of "
        f"{kill.whole / 1e6:.0f} MB written, no .metadata",
        f"the kill did not hit a save: {kill.checkpoint} holds "
        f"{sorted(path.name for path in kill.checkpoint.glob('*'))}",
    )
    previous = checkpoint_path(directory, kill.step - SAVE_EVERY)
    check(
        is_committed(previous),
        f"The save before it, of step {kill.step - SAVE_EVERY}, is committed",
        f"{previous} has no .metadata, although its save had ended before the next began",
    )


def check_resume(kill: Kill, resumed: Run) -> int:
    events = resumed.of("resume")
    step = events[0]["step"] if events else 0
    check(
        step == kill.step - SAVE_EVERY and min(resumed.losses(), default=0) == step + 1,
        f"Resumed from step {step}, the newest valid checkpoint",
        f"the resumed run started from step {step}, not {kill.step - SAVE_EVERY}",
    )
    left = sorted(path.name for path in kill.checkpoint.iterdir())
    check(
        len(left) == 2 and left[0] == ".metadata",
        f"It saved step {kill.step} again into the torn directory, and left no debris there",
        f"after the second save of step {kill.step} its directory holds {left}",
    )
    return step


READ_WITH_STOCK = """
import sys, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
state = _load_state_dict_from_keys("model", checkpoint_id=sys.argv[1])
assert "pyckpt" not in sys.modules
print(sum(tensor.numel() for tensor in state["model"].values()))
"""


def check_stock(checkpoint: Path, parameters: int) -> None:
    """Read a checkpoint in a process that knows nothing of pyckpt."""
    command = [sys.executable, "-W", "ignore", "-c", READ_WITH_STOCK, str(checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True)
    check(
        result.returncode == 0 and int(result.stdout) == parameters,
        f"Stock PyTorch reads all {parameters:,} parameters of {checkpoint.name}, without pyckpt",
        f"stock PyTorch read {result.stdout or 'nothing'} of {checkpoint}: {result.stderr}",
    )


def check_losses(reference: Run, killed: list[Run], resumed: Run) -> None:
    expected = reference.losses()
    everything = list(range(1, STEPS + 1))
    if list(expected) != everything:
        raise Failed(f"the uninterrupted run logged {len(expected)} steps, not {STEPS}")
    if len(set(expected.values())) < STEPS // 2:
        raise Failed("the losses of the uninterrupted run repeat: equal losses prove nothing")
    seen: set[int] = set()
    compared = 0
    for run in [*killed, resumed]:
        for step, loss in run.losses().items():
            if loss != expected[step]:
                raise Failed(
                    f"the loss of step {step} is {float.fromhex(loss)!r} in {run.log.name}, and "
                    f"{float.fromhex(expected[step])!r} without interruption"
                )
            seen.add(step)
            compared += 1
    check(
        sorted(seen) == everything,
        f"All {compared} losses equal those of the uninterrupted run, bit for bit",
        f"the killed and resumed runs miss steps {sorted(set(everything) - seen)}",
    )
    digests = [run.of("end")[0]["digest"] for run in (reference, resumed)]
    check(
        digests[0] == digests[1],
        f"So do the final weights and moments (SHA-256 {digests[0][:12]}…)",
        f"the final weights or moments differ: SHA-256 {digests[0]} and {digests[1]}",
    )


# ------------------------------------------------------------------------------------------- main


def demo(out: Path) -> None:
    checkpoints = out / "checkpoints"
    reference_directory, stock_directory = checkpoints / "uninterrupted", checkpoints / "stock"
    directory = checkpoints / "killed"

    reference = run_to_the_end(
        "uninterrupted",
        "uninterrupted",
        out,
        *("--checkpoints", reference_directory, "--compare", stock_directory),
    )
    # They have been timed; a gigabyte need not lie about during the rest.
    shutil.rmtree(reference_directory)
    shutil.rmtree(stock_directory)

    kill = train_and_kill(out, directory)
    check_kill(kill, directory)
    resumed = run_to_the_end("resumed", "resumed", out, "--checkpoints", directory, "--resume")
    resumed_from = check_resume(kill, resumed)
    check_stock(checkpoint_path(directory, STEPS), resumed.of("start")[0]["parameters"])
    check_losses(reference, kill.runs, resumed)

    console.print()
    console.print(saves_table(reference))
    if not all(save["direct"] for save in reference.of("save") if save["writer"] == "Checkpointer"):
        console.print("This file system refused direct I/O, so pyckpt wrote buffered.")
    path = out / "loss.png"
    plot(path, reference, kill, resumed, resumed_from)
    console.print(f"\nThe plot of the loss: {path}", highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kill a training run in the middle of a save, resume it, compare."
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints (0.7 GB)")
    args = parser.parse_args()

    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    checkpoints.mkdir(parents=True)
    started = time.perf_counter()
    try:
        demo(args.out)
    except Failed as failure:
        console.print(f"[bold red]✗ failed:[/] {escape(str(failure))}", highlight=False)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(checkpoints, ignore_errors=True)
    console.print(f"All of it holds, in {time.perf_counter() - started:.0f} s.", style="bold green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
