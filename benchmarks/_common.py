"""What the benchmarks share: the machine, interleaved rounds, fio, page cache, memory, results."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20

if importlib.util.find_spec("pyckpt") is None:
    sys.path.insert(0, str(ROOT))  # not installed: the extension was built in place

# DCP announces every save and load that runs without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unin")

Sample = dict[str, float]


class WrongBytes(Exception):
    """What was loaded is not what was saved: no number of this run means anything."""


# --- arguments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    directory: Path
    """An empty directory on the file system that is measured."""
    rounds: int
    size: int
    """Bytes of the large state."""
    sections: frozenset[str]
    output: Path | None
    quick: bool
    """Whether it is enough to see that it runs."""


@contextmanager
def options(
    name: str, description: str, sections: Sequence[str], *, rounds: int = 7, size_mib: int = 2048
) -> Iterator[Options]:
    """The command line, and a scratch directory that is removed at the end. ``rounds`` and
    ``size_mib`` are defaults."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build" / "benchmarks",
        help="where to write; its file system is what is measured (default: build/benchmarks)",
    )
    parser.add_argument("--rounds", type=int, help=f"samples of each variant (default: {rounds})")
    parser.add_argument(
        "--size-mib", type=int, help=f"size of the large state (default: {size_mib})"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="3 rounds of 256 MiB, to see that it runs; writes no results unless --output is given",
    )
    parser.add_argument(
        "--only", choices=sections, action="append", help="this section alone; may be repeated"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"the results (default: benchmarks/results/{name}.json, for a run of all sections)",
    )
    arguments = parser.parse_args()
    output: Path | None = arguments.output
    if output is None and not arguments.quick and not arguments.only:
        output = ROOT / "benchmarks" / "results" / f"{name}.json"
    arguments.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="pyckpt-", dir=arguments.dir))
    try:
        yield Options(
            directory=directory,
            rounds=arguments.rounds or (3 if arguments.quick else rounds),
            size=(arguments.size_mib or (256 if arguments.quick else size_mib)) * MIB,
            sections=frozenset(arguments.only or sections),
            output=output,
            quick=arguments.quick,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# --- the machine ------------------------------------------------------------------------------


def machine(directory: Path) -> dict[str, Any]:
    """What the numbers depend on."""
    device, file_system, mount_options = _mount_of(directory)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": file_system,
        "mount_options": mount_options,
        "device": device,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "pyckpt": _pyckpt_version(),
        "fio": _usable_fio(directory),
        **_commit(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mount_of(directory: Path) -> tuple[str, str, str]:
    number = os.stat(directory).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            file_system, device = fields[fields.index("-") + 1 :][:2]
            return device, file_system, fields[5]
    return wanted, "unknown", ""


def _pyckpt_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyckpt")
    except PackageNotFoundError:
        for line in (ROOT / "setup.py").read_text().splitlines():
            if line.startswith("VERSION"):
                return line.partition("=")[2].strip().strip('"')
        return "unknown"


def _commit() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # Only what is measured counts: results that a benchmark wrote make nothing dirty.
        changes = git(
            "status", "--porcelain", "--", "csrc", "pyckpt", "setup.py", "benchmarks/*.py"
        )
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


# --- variants and rounds ----------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to do what is compared."""

    name: str
    run: Callable[[], Sample]
    """Does it, and measures. ``seconds`` is taken from outside where it does not say so itself, and
    ``cpu_seconds`` always: the CPU time of all threads, and of children that ended meanwhile."""
    check: Callable[[], None] = lambda: None
    """Raises WrongBytes unless ``run`` did it right. Called once, outside of the timing."""
    clean: Callable[[], None] = lambda: None
    """Removes what ``run`` left."""
    peer: bool = False
    """Whether it is another's, without which the rest is measured all the same."""


def interleave(
    variants: Sequence[Variant],
    rounds: int,
    *,
    before: Callable[[], None],
    console: Console,
    title: str,
    quiet: bool = False,
    deadline: float = math.inf,
    after_round: Callable[[dict[str, list[Sample]]], None] = lambda samples: None,
    peer_failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[Sample]]:
    """Run each variant once for its check, then all of them in every round, in an order that is
    rotated by one from round to round. ``before`` is called before each run. ``after_round`` is
    given what there is so far. There is one round in any case, and no further one that would last
    beyond the ``deadline`` (of ``time.monotonic``). ``peer_failed`` is told of a peer that raised,
    which is left out from there on; without it, the exception ends all."""
    samples: dict[str, list[Sample]] = {variant.name: [] for variant in variants}
    console.print(f"[bold]{title}[/]")
    failed: set[str] = set()

    def attempt(variant: Variant, action: Callable[[], None]) -> None:
        if variant.name in failed:
            return
        try:
            action()
        except Exception as error:
            if peer_failed is None or not variant.peer:
                raise
            failed.add(variant.name)
            peer_failed(variant.name, error)

    def try_it(variant: Variant) -> None:
        before()
        variant.run()
        variant.check()
        variant.clean()

    def measure(variant: Variant) -> None:
        before()
        start, cpu_start = time.perf_counter(), _cpu_seconds()
        sample = variant.run()
        sample["cpu_seconds"] = _cpu_seconds() - cpu_start
        sample.setdefault("seconds", time.perf_counter() - start)
        samples[variant.name].append(sample)
        variant.clean()

    for variant in variants:
        attempt(variant, functools.partial(try_it, variant))
    for number in range(rounds):
        round_start = time.monotonic()
        at = number % len(variants)
        for variant in [*variants[at:], *variants[:at]]:
            attempt(variant, functools.partial(measure, variant))
        if not quiet:
            console.print(f"  round {number + 1} of {rounds}", style="dim")
        after_round({name: taken for name, taken in samples.items() if taken})
        now = time.monotonic()
        if number + 1 < rounds and now + (now - round_start) > deadline:
            console.print(f"  no time for more than {number + 1} of {rounds} rounds")
            break
    return samples


def _cpu_seconds() -> float:
    usages = [
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(function: Callable[[], Any]) -> Sample:
    start = time.perf_counter()
    function()
    return {"seconds": time.perf_counter() - start}


@dataclass(frozen=True)
class Spread:
    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        quartiles = (
            statistics.quantiles(self.samples, n=4, method="inclusive")
            if len(self.samples) > 1
            else [self.median] * 3
        )
        return {
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "quartile_1": quartiles[0],
            "quartile_3": quartiles[2],
            "samples": self.samples,
        }


# --- the report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    name: str
    value: float | None
    """None where it could not be measured."""
    limit: float
    at_least: bool
    unit: str

    @property
    def met(self) -> bool | None:
        if self.value is None or math.isnan(self.value):
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        bound = f"{'>=' if self.at_least else '<='} {_number(self.limit)} {self.unit}".rstrip()
        if self.value is None or self.met is None:
            return self.name, "not measured", bound, "[yellow]not judged[/]"
        verdict = "[green]met[/]"
        if not self.met:
            verdict = f"[red]missed by {abs(self.value / self.limit - 1):.0%}[/]"
        return self.name, f"{_number(self.value)} {self.unit}".rstrip(), bound, verdict


def _number(value: float) -> str:
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def _table(title: str, headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(headings[0], max_width=32)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


@dataclass
class Report:
    """Collects, prints, and writes what a run measured."""

    name: str
    parameters: dict[str, Any]
    machine: dict[str, Any]
    console: Console = field(default_factory=lambda: Console(width=118, highlight=False))
    results: dict[str, dict[str, dict[str, Spread]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show_machine(self) -> None:
        for key, value in self.machine.items():
            shown = f"{value / (1 << 30):.1f} GiB" if key == "memory_bytes" else value
            self.console.print(f"  {key.removesuffix('_bytes'):16} {shown}")

    def add(self, group: str, samples: Mapping[str, Sequence[Sample]]) -> None:
        for variant, measured in samples.items():
            keys = measured[0].keys()
            self.results.setdefault(group, {})[variant] = {
                key: Spread([float(sample[key]) for sample in measured]) for key in keys
            }

    def median(self, group: str, variant: str, metric: str = "seconds") -> float | None:
        spread = self.results.get(group, {}).get(variant, {}).get(metric)
        return None if spread is None else spread.median

    def ratio(self, group: str, over: str, under: str, metric: str = "seconds") -> float | None:
        """Median of one variant over that of another."""
        upper, lower = self.median(group, over, metric), self.median(group, under, metric)
        return None if upper is None or lower is None else upper / lower

    def best(self, group: str, variants: Sequence[str], metric: str = "seconds") -> str:
        """The variant of the smallest median."""
        return min(variants, key=lambda name: self.median(group, name, metric) or math.inf)

    def table(
        self, title: str, group: str, metrics: Mapping[str, tuple[str, Callable[[float], float]]]
    ) -> None:
        """Print a group: for each metric (heading, conversion) its median and, of more samples
        than one, its range below it. Variants stand below each other, or beside each other where
        that would be too wide."""
        of_group = self.results[group]
        single = all(len(s.samples) == 1 for v in of_group.values() for s in v.values())

        def cell(variant: str, metric: str) -> str:
            spread = of_group[variant].get(metric)
            if spread is None or not spread.samples:
                return ""
            values = [metrics[metric][1](value) for value in spread.samples]
            text = _number(statistics.median(values))
            if not single:
                text += f"\n[dim]{_number(min(values))}..{_number(max(values))}[/]"
            return text

        headings = [heading for heading, _ in metrics.values()]
        rows = [[variant, *(cell(variant, metric) for metric in metrics)] for variant in of_group]
        table = _table(title, ["variant", *headings], rows)
        unlimited = self.console.options.update(max_width=10_000)
        if self.console.measure(table, options=unlimited).minimum > self.console.width:
            turned = zip(headings, *(row[1:] for row in rows), strict=True)
            table = _table(title, ["", *of_group], turned)
        self.console.print(table)

    def target(
        self,
        name: str,
        value: float | None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "",
    ) -> None:
        limit = at_least if at_least is not None else at_most
        assert limit is not None
        self.targets.append(Target(name, value, limit, at_least is not None, unit))

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.console.print(f"  {text}")

    def finish(self, output: Path | None) -> None:
        table = Table(title="Targets", title_justify="left", title_style="bold")
        table.add_column("what", overflow="fold")
        for heading in ("measured", "target"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for target in self.targets:
            table.add_row(*target.row())
        if self.targets:
            self.console.print(table)
        if output is not None:
            self.write(output)
            self.console.print(f"written: {os.path.relpath(output)}")

    def write(self, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Never half a file, whenever the run is cut off.
        temporary = output.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content(), indent=1) + "\n")
        temporary.replace(output)

    def content(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "machine": self.machine,
            "parameters": self.parameters,
            "targets": [
                {
                    "name": target.name,
                    "value": target.value,
                    "limit": target.limit,
                    "bound": "at least" if target.at_least else "at most",
                    "unit": target.unit,
                    "met": target.met,
                }
                for target in self.targets
            ],
            "notes": self.notes,
            "results": {
                group: {
                    variant: {metric: spread.as_dict() for metric, spread in spreads.items()}
                    for variant, spreads in variants.items()
                }
                for group, variants in self.results.items()
            },
        }


def gigabytes_per_second(size: int) -> tuple[str, Callable[[float], float]]:
    """For `Report.table`: a time as the speed at which ``size`` bytes went."""
    return "GB/s", lambda seconds: size / seconds / 1e9


def cpu_seconds_per_gigabyte(size: int) -> tuple[str, Callable[[float], float]]:
    """For `Report.table`: a CPU time as that of 1e9 of ``size`` bytes."""
    return "CPU s/GB", lambda seconds: seconds / size * 1e9


def run(
    name: str,
    sections: Mapping[str, Callable[[Report, Options], None]],
    about: str,
    **defaults: int,
) -> int:
    """The main function of a benchmark. Returns the exit code: 1 if bytes were wrong, else 0.
    ``defaults`` are those of `options`."""
    with options(name, about, list(sections), **defaults) as chosen:
        report = Report(
            name,
            {
                "rounds": chosen.rounds,
                "size_bytes": chosen.size,
                "sections": sorted(chosen.sections),
                "page_cache": _drop_method(),
            },
            machine(chosen.directory),
        )
        report.show_machine()
        if report.machine["fio"] is None:
            report.note(
                "fio is not installed, or cannot do direct I/O here: nothing is compared with it"
            )
        try:
            for section, measure in sections.items():
                if section in chosen.sections:
                    measure(report, chosen)
        except WrongBytes as error:
            report.console.print(f"[bold red]WRONG BYTES[/] {error}")
            return 1
        except Exception:
            report.note(f"cut off in section {section}")
            report.finish(chosen.output)
            raise
        report.finish(chosen.output)
        return 0


# --- states -----------------------------------------------------------------------------------

LARGE_TENSORS = 128
SMALL_TENSORS = 5_000
SMALL_TENSOR_BYTES = 16 << 10
SCALARS = 4_000

State = dict[str, dict[str, Any]]
"""Groups of tensors, or of plain numbers."""


def large_state(size: int, *, fill: bool = True) -> State:
    """``size`` bytes in 128 float32 tensors. Without ``fill`` all are zero (and in memory)."""
    generator = torch.Generator().manual_seed(1)
    count = size // LARGE_TENSORS // 4
    return {
        "model": {
            f"weight.{i:03d}": torch.rand(count, generator=generator)
            if fill
            else torch.zeros(count).fill_(0.0)
            for i in range(LARGE_TENSORS)
        }
    }


def small_state() -> State:
    """5,000 tensors of 16 KiB and 4,000 0-d scalars, as an optimizer has them."""
    generator = torch.Generator().manual_seed(2)
    return {
        "tensors": {
            f"weight.{i:04d}": torch.rand(SMALL_TENSOR_BYTES // 4, generator=generator)
            for i in range(SMALL_TENSORS)
        },
        "scalars": {f"step.{i:04d}": torch.tensor(float(i)) for i in range(SCALARS)},
    }


def mixed_state() -> State:
    """5,000 tensors of 16 KiB and 4,000 Python floats, as a training program's own records are."""
    return {
        "tensors": small_state()["tensors"],
        "numbers": {f"number.{i:04d}": i / 7 for i in range(SCALARS)},
    }


def zeros_like(state: State) -> State:
    # Filled, so that the pages are there before the time is taken.
    def zero(value: Any) -> Any:
        return torch.empty_like(value).fill_(0) if isinstance(value, torch.Tensor) else 0.0

    return {
        group: {name: zero(value) for name, value in values.items()}
        for group, values in state.items()
    }


def set_zero(state: State) -> None:
    for values in state.values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            else:
                values[name] = 0.0


def nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())


def must_equal(found: State, expected: State, who: str) -> None:
    for group, values in expected.items():
        for name, value in values.items():
            other = found[group][name]
            if not isinstance(value, torch.Tensor):
                same = type(other) is type(value) and other == value
            else:
                same = other.dtype == value.dtype and torch.equal(other, value)
            if not same:
                raise WrongBytes(f"{who}: {group}.{name} is not what was saved")


# --- the disk ---------------------------------------------------------------------------------


def _usable_fio(directory: Path) -> str | None:
    """The version of fio, if it is installed and can do direct I/O in the directory."""
    probe = directory / "probe"
    try:
        fio(probe, 8 * MIB, "write")
        result = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    finally:
        probe.unlink(missing_ok=True)
    return result.stdout.strip()


def fio(path: Path, size: int, mode: str) -> Sample:
    """Write or read one file with direct I/O, 8 MiB blocks and depth 16. The time is fio's own: for
    writing it includes the fsync at the end, and neither making nor preallocating the file."""
    command = [
        "fio",
        "--name=pyckpt",
        f"--filename={path}",
        f"--rw={mode}",
        f"--size={size}",
        "--bs=8M",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=16",
        "--output-format=json",
    ]
    if mode == "read":
        command.append("--readonly")
    else:
        command += ["--end_fsync=1", "--fallocate=posix"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    # Warnings may stand before the JSON.
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0][mode]
    if job["io_bytes"] != size:
        raise RuntimeError(f"fio moved {job['io_bytes']} of {size} bytes")
    return {"seconds": job["runtime"] / 1000}


def remove(path: Path) -> None:
    """Remove a file or directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def _drop_method() -> str:
    return "drop_caches" if os.access(_DROP_CACHES, os.W_OK) and os.geteuid() == 0 else "fadvise"


def drop_page_cache(directory: Path) -> None:
    """Take the files below ``directory`` out of the page cache: of the whole machine as root, else
    by POSIX_FADV_DONTNEED on each of them."""
    os.sync()
    if _drop_method() == "drop_caches":
        _DROP_CACHES.write_text("1\n")
        return
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- processes --------------------------------------------------------------------------------

# Children are forked from a server that imported everything once: so they are clean, and quick.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pyckpt", "torch.distributed.tensor", "torch._dynamo", "_common"])
_TIMEOUT_S = 600.0


def preload(*modules: str) -> None:
    """Have children start with these modules imported, too. Call it before the first of them."""
    names = ["pyckpt", "torch.distributed.tensor", "torch._dynamo", "_common"]
    _CONTEXT.set_forkserver_preload([*names, *modules])


def in_children(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = _TIMEOUT_S
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``count`` new processes; return what they return."""
    children = []
    for rank in range(count):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_child, args=(theirs, function, rank, arguments), daemon=True
        )
        process.start()
        theirs.close()
        children.append((ours, process))
    try:
        results = []
        for ours, process in children:
            if not ours.poll(timeout_s):
                raise TimeoutError(f"a child took more than {timeout_s:.0f} s")
            failed, value = ours.recv()
            if failed:
                raise failed(value)
            results.append(value)
            process.join()
        return results
    finally:
        for _, process in children:
            if process.is_alive():
                process.kill()
            process.join()


def _child(connection: Any, function: Callable[..., Any], rank: int, arguments: Any) -> None:
    import traceback

    try:
        connection.send((None, function(rank, *arguments)))
    except WrongBytes as error:
        connection.send((WrongBytes, str(error)))
    except BaseException:
        connection.send((RuntimeError, traceback.format_exc()))


@contextmanager
def process_group(rank: int, ranks: int, rendezvous: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    path = rendezvous.absolute()  # a URL has no others
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        if dist.is_initialized():  # the end of a framework's training destroys it
            dist.destroy_process_group()


def peak_growth(action: Callable[[], Any]) -> Sample:
    """By how much the resident memory of this process grows at most during ``action``. For a
    process of its own, whose memory nothing else grows."""
    gc.collect()
    forget_peak()
    before = status_bytes("VmRSS")
    action()
    return {"growth_bytes": status_bytes("VmHWM") - before, "before_bytes": before}


def forget_peak() -> None:
    """The peak of this process's resident memory is now what is resident now."""
    Path("/proc/self/clear_refs").write_text("5\n")


def status_bytes(name: str) -> int:
    """A figure of this process in ``/proc/self/status``: "VmRSS", say."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def io_counters() -> dict[str, int]:
    """What this process has read so far: through system calls (rchar), from disk (read_bytes)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
