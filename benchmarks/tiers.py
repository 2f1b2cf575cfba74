"""What a mirror costs, and how fast it is filled and read.

    python benchmarks/tiers.py [--quick] [--only SECTION]

- commit: a save, from the call to the local commit, with a mirror in memory going on and without.
- upload: a data file brought to a bucket, beside a bare multipart upload by obstore; and to another
  directory, beside a bare copy.
- direct: a save into a bucket without a file in between, beside a bare multipart upload of the same
  bytes from memory.
- load: a checkpoint loaded from a bucket, beside bare parallel gets of its bytes, and beside stock
  over obstore's fsspec; and how many requests each makes.
- faults: a mirror whose every request takes 200 ms more, and of which one in a hundred fails.

The server is moto's, in a process of its own on this machine: it is no fast server, so only the
ratios mean something.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import (
    LARGE_TENSORS,
    MIB,
    Options,
    Report,
    Sample,
    Variant,
    WrongBytes,
    drop_page_cache,
    gigabytes_per_second,
    interleave,
    large_state,
    must_equal,
    remove,
    run,
    set_zero,
    timed,
    zeros_like,
)
from _s3_server import Server, serving

import pyckpt
from pyckpt.remote.address import open_store
from pyckpt.remote.job import GET_BYTES
from pyckpt.train.tiers.bucket import BucketTier
from pyckpt.train.tiers.mounted import MountedTier

BUCKET = "runs"
STORE_SIZE_MAX = 256 * MIB  # moto keeps all in memory, several times over
STOCK_SIZE = 8 * MIB


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory that is no disk's."""
    path = Path(tempfile.mkdtemp(prefix="pyckpt-mirror-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- commit ---------------------------------------------------------------------------------------


def measure_commit(report: Report, options: Options) -> None:
    state = large_state(options.size // 4)
    steps = {"without a mirror": 0, "with a mirror": 0}

    def saving(name: str, checkpointer: pyckpt.Checkpointer) -> Variant:
        def save() -> Sample:
            steps[name] += 1
            return timed(lambda: checkpointer.save(steps[name], state).wait())

        return Variant(name, save)

    with in_memory() as memory:
        plain = pyckpt.Checkpointer(options.directory / "plain", keep_last=1)
        mirrored = pyckpt.Checkpointer(
            options.directory / "mirrored", keep_last=1, mirror=memory, mirror_keep_last=1
        )
        with plain, mirrored:
            # The save of each round begins while the checkpoint of the one before is being copied.
            samples = interleave(
                [saving("without a mirror", plain), saving("with a mirror", mirrored)],
                options.rounds,
                before=lambda: None,
                console=report.console,
                title="commit",
            )
        promoted = mirrored.statistics.mirror
        assert promoted is not None
        last = steps["with a mirror"]
        found = pyckpt.load(memory / f"step-{last:08d}")
        must_equal({"model": found["model"]}, state, "the mirror")
    report.add("commit", samples)
    report.table(
        f"Local commit of {options.size // 4 / MIB:,.0f} MiB, while the mirror is filled",
        "commit",
        {"seconds": ("seconds", lambda seconds: seconds)},
    )
    report.note(
        f"{promoted.promoted} of {last} came to the mirror, {promoted.dropped} were dropped"
    )
    report.target(
        "local commit with a mirror, over one without",
        report.ratio("commit", "with a mirror", "without a mirror"),
        at_most=1.05,
        unit="x",
    )


# --- upload ---------------------------------------------------------------------------------------


def checkpoint_of(options: Options, size: int) -> tuple[Path, Path, Any]:
    """A checkpoint on disk, its data file, and its state."""
    state = large_state(size)
    path = options.directory / f"checkpoint-{size}"
    if not path.exists():
        pyckpt.save(state, path)
    (file,) = path.glob("*.distcp")
    return path, file, state


def measure_upload(report: Report, options: Options) -> None:
    import obstore

    size = min(options.size, STORE_SIZE_MAX)
    _, file, _ = checkpoint_of(options, size)
    with serving(BUCKET):
        tier = BucketTier(f"s3://{BUCKET}/ours", options.directory)
        bare = open_store(f"s3://{BUCKET}/bare")

        def check(store: Any, name: str) -> None:
            if obstore.get(store, name).bytes() != file.read_bytes():
                raise WrongBytes(name)

        ours = open_store(f"s3://{BUCKET}/ours")
        name = f"step-00000001/{file.name}"
        samples = interleave(
            [
                Variant(
                    "mirror",
                    lambda: timed(lambda: tier.upload(1, file, lambda count: None)),
                    lambda: check(ours, name),
                    lambda: obstore.delete(ours, name),
                ),
                Variant(
                    "obstore.put",
                    lambda: timed(
                        lambda: obstore.put(
                            bare, "file", file, chunk_size=8 * MIB, max_concurrency=4
                        )
                    ),
                    lambda: check(bare, "file"),
                    lambda: obstore.delete(bare, "file"),
                ),
            ],
            options.rounds,
            before=lambda: drop_page_cache(options.directory),
            console=report.console,
            title="upload",
        )
    report.add("upload", samples)
    report.table(
        f"Bringing {size / MIB:,.0f} MiB to a bucket",
        "upload",
        {"seconds": gigabytes_per_second(size)},
    )
    report.target(
        "upload to a bucket, over obstore's own",
        report.ratio("upload", "obstore.put", "mirror"),
        at_least=0.9,
        unit="x",
    )
    measure_copy(report, options)


# --- direct ---------------------------------------------------------------------------------------


def measure_direct(report: Report, options: Options) -> None:
    import obstore

    size = min(options.size, STORE_SIZE_MAX)
    state = large_state(size)
    target = zeros_like(state)
    with serving(BUCKET):
        url = f"s3://{BUCKET}/direct"
        bare = open_store(f"s3://{BUCKET}/bare")
        pyckpt.save(state, url)
        store = open_store(url)
        listed = [one["path"] for page in obstore.list(store) for one in page]
        (name,) = (path for path in listed if path.endswith(".distcp"))
        data = bytes(obstore.get(store, name).bytes())

        def check() -> None:
            pyckpt.load(target, url)
            must_equal(target, state, url)

        samples = interleave(
            [
                Variant(
                    "DirectWriter(url)",
                    lambda: timed(lambda: pyckpt.save(state, url, overwrite=True)),
                    check,
                ),
                Variant(
                    "obstore.put",
                    lambda: timed(
                        lambda: obstore.put(
                            bare, "file", data, chunk_size=8 * MIB, max_concurrency=4
                        )
                    ),
                ),
            ],
            options.rounds,
            before=lambda: None,
            console=report.console,
            title="direct",
        )
    report.add("direct", samples)
    report.table(
        f"Saving {size / MIB:,.0f} MiB into a bucket",
        "direct",
        {"seconds": gigabytes_per_second(size)},
    )
    report.target(
        "a save into a bucket, over obstore's put of the same bytes",
        report.ratio("direct", "obstore.put", "DirectWriter(url)"),
        at_least=0.9,
        unit="x",
    )


def measure_copy(report: Report, options: Options) -> None:
    _, file, _ = checkpoint_of(options, options.size)
    there = options.directory / "there"
    tier = MountedTier(there, options.directory)
    copy = options.directory / "copy"

    def bare() -> Sample:
        def act() -> None:
            with open(file, "rb") as source, open(copy, "wb") as target:
                shutil.copyfileobj(source, target, 8 * MIB)
                target.flush()
                os.fsync(target.fileno())

        return timed(act)

    def check(found: Path) -> None:
        if found.read_bytes() != file.read_bytes():
            raise WrongBytes(str(found))

    samples = interleave(
        [
            Variant(
                "mirror",
                lambda: timed(lambda: tier.upload(1, file, lambda count: None)),
                lambda: check(tier.place(1) / file.name),
                lambda: remove(there),
            ),
            Variant("copy and fsync", bare, lambda: check(copy), lambda: remove(copy)),
        ],
        options.rounds,
        before=lambda: drop_page_cache(options.directory),
        console=report.console,
        title="copy",
    )
    report.add("copy", samples)
    report.table(
        f"Bringing {options.size / MIB:,.0f} MiB to another directory of the same disk",
        "copy",
        {"seconds": gigabytes_per_second(options.size)},
    )
    report.target(
        "copy to a directory, over a bare copy",
        report.ratio("copy", "copy and fsync", "mirror"),
        at_least=0.9,
        unit="x",
    )


# --- load -----------------------------------------------------------------------------------------


def measure_load(report: Report, options: Options) -> None:
    import obstore

    size = min(options.size, STORE_SIZE_MAX)
    path, file, state = checkpoint_of(options, size)
    target = zeros_like(state)
    url = f"s3://{BUCKET}/run"
    with serving(BUCKET) as server:
        store = open_store(url)
        for one in path.iterdir():
            obstore.put(store, one.name, one)
        length = file.stat().st_size

        def bare() -> None:
            def get(begin: int) -> int:
                end = min(begin + GET_BYTES, length)
                return sum(
                    len(chunk)
                    for chunk in obstore.get(store, file.name, options={"range": (begin, end)})
                )

            with ThreadPoolExecutor(8) as threads:
                if sum(threads.map(get, range(0, length, GET_BYTES))) != length:
                    raise WrongBytes(file.name)

        def counted(act: Callable[[], object]) -> Callable[[], Sample]:
            def run_it() -> Sample:
                before = server.requests()
                sample = timed(act)
                gets = server.requests().get("GET", 0) - before.get("GET", 0)
                return {**sample, "gets": float(gets)}

            return run_it

        samples = interleave(
            [
                Variant(
                    "pyckpt.load",
                    counted(lambda: pyckpt.load(target, url)),
                    lambda: must_equal(target, state, "load"),
                ),
                Variant("bare gets", counted(bare)),
            ],
            options.rounds,
            before=lambda: set_zero(target),
            console=report.console,
            title="load",
        )
        report.add("load", samples)
        measure_stock_load(report, options, server)
    report.table(
        f"Loading {size / MIB:,.0f} MiB from a bucket",
        "load",
        {"seconds": gigabytes_per_second(size), "gets": ("requests", lambda count: count)},
    )
    report.target(
        "load from a bucket, over bare gets",
        report.ratio("load", "bare gets", "pyckpt.load"),
        at_least=0.9,
        unit="x",
    )
    report.target(
        "requests of a load",
        report.median("load", "pyckpt.load", "gets"),
        at_most=-(-size // GET_BYTES) + 3,  # the metadata, what there is, and numbers
    )


def measure_stock_load(report: Report, options: Options, server: Server) -> None:
    """Stock over obstore's fsspec makes so many requests that a small state must do, once."""
    import obstore
    from obstore.fsspec import register
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    register("s3")
    path, _, state = checkpoint_of(options, STOCK_SIZE)
    url = f"s3://{BUCKET}/small"
    for one in path.iterdir():
        obstore.put(open_store(url), one.name, one)
    target = zeros_like(state)
    found = {}
    for who, act in {
        "pyckpt.load": lambda: pyckpt.load(target, url),
        "stock, obstore's fsspec": lambda: load(
            target, storage_reader=FsspecReader(url), no_dist=True
        ),
    }.items():
        set_zero(target)
        before = server.requests()
        sample = timed(act)
        must_equal(target, state, who)
        sample["gets"] = float(server.requests()["GET"] - before.get("GET", 0))
        found[who] = [sample]
    report.add("load, small", found)
    report.table(
        f"Loading {STOCK_SIZE / MIB:,.0f} MiB in {LARGE_TENSORS} tensors from a bucket",
        "load, small",
        {
            "seconds": ("seconds", lambda seconds: seconds),
            "gets": ("requests", lambda count: count),
        },
    )


# --- faults ---------------------------------------------------------------------------------------


def measure_faults(report: Report, options: Options) -> None:
    size = min(options.size, STORE_SIZE_MAX)
    state = large_state(size)
    with serving(BUCKET, latency=0.2, errors=0.01) as server:
        url = f"s3://{BUCKET}/run"

        def act() -> None:
            with pyckpt.Checkpointer(
                options.directory / "faults", keep_last=1, mirror=url, mirror_keep_last=1
            ) as checkpointer:
                for step in range(1, 4):
                    checkpointer.save(step, state).wait()
                    checkpointer.wait_mirrored()
            statistics = checkpointer.statistics.mirror
            assert statistics is not None
            if statistics.promoted != 3:
                raise WrongBytes(f"not all came to the mirror: {statistics}")

        sample = timed(act)
        sample["requests"] = float(sum(server.requests().values()))
        target = zeros_like(state)
        pyckpt.load(target, f"{url}/step-00000003")
        must_equal(target, state, "the mirror")
    report.add("faults", {"three saves": [sample]})
    report.note(
        f"three saves of {size / MIB:,.0f} MiB came to a mirror with 200 ms of latency and 1 % "
        f"of errors in {sample['seconds']:.1f} s, by {sample['requests']:.0f} requests"
    )


SECTIONS: dict[str, Any] = {
    "commit": measure_commit,
    "upload": measure_upload,
    "direct": measure_direct,
    "load": measure_load,
    "faults": measure_faults,
}

if __name__ == "__main__":
    sys.exit(run("tiers", SECTIONS, __doc__ or ""))
