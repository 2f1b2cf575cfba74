"""One parser, in a process of its own, which `torture.fuzz` starts.

The input that is tried is in a file before it is tried: it is known then what ended the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

HANG_SECONDS = 120
CPU_SECONDS = 10.0
_WALL_FACTOR = 12
"""A worker ends after so many times its seconds of CPU, however little it got of the processor."""
GROWTH_BYTES = 512 << 20
SPACE_BYTES = 4 << 30


class Trial:
    """Tries inputs, and keeps those of each new kind that go wrong.

    Args:
        found: the folder for them; ``current`` in it is the input that is tried.
    """

    def __init__(self, parser: Any, found: Path) -> None:
        self._parser = parser
        self._found = found
        self._current = os.open(found / "current", os.O_RDWR | os.O_CREAT, 0o666)
        self.executions = 0
        self._begun = time.process_time()
        self._told = 0.0
        self._kinds: set[str] = set()

    @property
    def spent(self) -> float:
        """Seconds of CPU."""
        return time.process_time() - self._begun

    def __call__(self, data: bytes) -> None:
        os.ftruncate(self._current, 0)
        os.pwrite(self._current, data, 0)
        self.executions += 1
        begun, memory = time.process_time(), _peak()
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            self._parser.run(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._keep(data, error)
        faulthandler.cancel_dump_traceback_later()
        spent, grown = time.process_time() - begun, _peak() - memory
        if spent > CPU_SECONDS:
            self._note(data, "slow", f"took {spent:.1f} s of CPU")
        if grown > GROWTH_BYTES + 64 * len(data):
            self._note(data, "large", f"took {grown >> 20} MiB")
        self.tell()

    def _keep(self, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [one for one in frames if f"{os.sep}pyckpt{os.sep}" in one.filename] or frames
        last = ours[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        kind = f"{type(error).__name__} at {where}"
        if type(error).__name__ == "Wrong":
            kind = f"Wrong: {str(error)[:60]}"
        self._note(data, kind, "".join(traceback.format_exception(error)))

    def _note(self, data: bytes, kind: str, what: str) -> None:
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        name = hashlib.sha256(data).hexdigest()[:12]
        (self._found / f"{name}.input").write_bytes(data)
        (self._found / f"{name}.txt").write_text(f"{kind}\n\n{what}")
        print(f"{kind} ({name})", file=sys.stderr, flush=True)

    def tell(self, *, now: bool = False) -> None:
        """Writes the counts, so that they outlive the process."""
        if not now and time.monotonic() - self._told < 1:
            return
        self._told = time.monotonic()
        counts = {"executions": self.executions, "cpu_seconds": self.spent}
        whole = self._found / "counts.new"
        whole.write_text(json.dumps(counts))
        whole.rename(self._found / "counts.json")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _bound() -> None:
    """What this process may take beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("parser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10, help="of CPU")
    parser.add_argument("--executions", type=int, default=0, help="at most; 0: no limit")
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--guided", type=Path, metavar="CORPUS", help="by coverage; keeps it here")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of names that are twice in archives that are made here
    guide: Any = None
    if arguments.guided is not None:
        import atheris

        guide = atheris
        with atheris.instrument_imports(include=["pyckpt"]):
            import pyckpt.convert
            import pyckpt.profiling.nsys
            import pyckpt.tools.trace
            import pyckpt.tools.verifying  # noqa: F401
    import torch

    from torture.fuzz.parsers import PARSERS

    torch.set_num_threads(1)
    arguments.found.mkdir(parents=True, exist_ok=True)
    # Whoever started this removes it, however this ends.
    with tempfile.TemporaryDirectory(prefix="files-", dir=arguments.found) as folder:
        parser = PARSERS[arguments.parser](Path(folder))
        seeds = parser.seeds()
        seeds += [path.read_bytes() for path in sorted(arguments.corpus.glob("*"))]
        trial = Trial(parser, arguments.found)
        for seed in seeds:
            trial(seed)
        _bound()
        if guide is not None:
            _guided(guide, arguments, trial, parser, seeds)
        else:
            _seeded(arguments, trial, parser, seeds)
        trial.tell(now=True)


def _seeded(arguments: argparse.Namespace, trial: Trial, parser: Any, seeds: list[bytes]) -> None:
    """Changes of what is sound, one after another, and of what came of them."""
    random = Random(f"{arguments.parser} {arguments.seed}")
    pool = list(seeds)
    end = time.monotonic() + _WALL_FACTOR * arguments.seconds
    while trial.spent < arguments.seconds and time.monotonic() < end:
        if arguments.executions and trial.executions >= arguments.executions:
            break
        made = parser.change(random, random.choice(pool), pool)
        trial(made)
        if random.random() < 0.02:
            if len(pool) < 4 * len(seeds) + 64:
                pool.append(made)
            else:
                pool[random.randrange(len(seeds), len(pool))] = made


def _guided(
    atheris: Any, arguments: argparse.Namespace, trial: Trial, parser: Any, seeds: list[bytes]
) -> None:
    """By the coverage of pyckpt's Python; this does not return."""
    corpus: Path = arguments.guided
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def change(data: bytes, most: int, seed: int) -> bytes:
        made: bytes = parser.change(Random(seed), data, seeds)
        return made[:most]

    longest = 2 * max(map(len, seeds)) + 4096
    options = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={max(1, int(_WALL_FACTOR * arguments.seconds))}",
        f"-seed={arguments.seed + 1}",
        f"-max_len={longest}",
        "-rss_limit_mb=0",
        "-timeout=300",
        "-print_final_stats=0",
        "-verbosity=0",
    ]
    if arguments.executions:
        options.append(f"-runs={arguments.executions}")

    def attempt(data: bytes) -> None:
        trial(data)
        if trial.spent >= arguments.seconds:
            trial.tell(now=True)
            os._exit(0)

    atheris.Setup(options, attempt, custom_mutator=change, internal_libfuzzer=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
