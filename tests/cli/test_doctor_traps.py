"""What the doctor says of machines and environments that are not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyckpt.tools.doctor import Finding, machine, software, storage

LINES = r"""
22 1 254:0 / / rw,relatime - overlay overlay rw,lowerdir=/a
30 22 0:40 / /data rw,relatime - nfs4 server:/data rw,vers=4.2,local_lock=all
31 30 0:41 / /data/with\040space rw,sync - ext4 /dev/sdb rw
32 30 0:42 / /data/covered rw - ext4 /dev/sdc rw
33 32 0:43 / /data/covered ro - fuse.gcsfuse bucket ro
"""


def found(findings: object) -> dict[str, str]:
    return {finding.about: finding.level for finding in findings}  # type: ignore[attr-defined]


def test_a_path_is_on_the_last_mount_of_the_longest_point() -> None:
    for path, kind in (
        ("/", "overlay"),
        ("/database", "overlay"),
        ("/data/x/y", "nfs4"),
        ("/data/with space/x", "ext4"),
        ("/data/covered", "fuse.gcsfuse"),
    ):
        mount = storage.mount_of(Path(path), LINES)
        assert mount is not None
        assert mount.kind == kind, path
    assert storage.mount_of(Path("/"), "") is None


def test_kinds_and_options_of_mounts() -> None:
    def about(path: str) -> list[tuple[str, str]]:
        mount = storage.mount_of(Path(path), LINES)
        return [(finding.about, finding.level) for finding in storage.about_mount(mount)]

    assert about("/") == [("file system", "warning")]
    assert about("/data") == [("file system", "warning"), ("mount options", "warning")]
    assert about("/data/with space") == [("file system", "good"), ("mount options", "warning")]
    assert about("/data/covered") == [("file system", "warning"), ("mount options", "bad")]


def limits(**changes: object) -> machine.Limits:
    plain = {"memory": 64 << 30, "available": 60 << 30, "processors": 8, "pinned": 16 << 30}
    return machine.Limits(**(plain | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"available": 1 << 30}, "memory"),
        ({"huge_pages": "never"}, "huge pages"),
        ({"locked": 8 << 20}, "locked memory"),
        ({"cgroup_processors": 1.5}, "processors"),
        ({"files": 1024}, "open files"),
        ({"cgroup_tasks": 32}, "threads"),
        ({"threads": 32}, "threads"),
    ],
)
def test_limits_that_are_too_low(changes: dict[str, object], about: str) -> None:
    assert set(found(machine.judge(limits(), on_cuda=True)).values()) == {"good"}
    findings = {f.about: f for f in machine.judge(limits(**changes), on_cuda=True)}
    assert [name for name, finding in findings.items() if finding.level != "good"] == [about]
    assert findings[about].level == "warning"
    assert findings[about].advice


def test_without_a_gpu_locked_memory_is_a_note() -> None:
    assert found(machine.judge(limits(locked=0), on_cuda=False))["locked memory"] == "note"


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """The least of those from the process's own group up to the root; in a container, its path
    leads nowhere."""
    unified = tmp_path / "unified"
    write(
        unified,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  500 kB\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": "4096\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pids.max": "64\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/devices/system/node/online": "0-1,4\n",
        },
    )
    read = machine.read_limits(0, unified)
    assert (read.memory, read.available) == (1_024_000, 512_000)
    assert (read.cgroup_memory, read.cgroup_processors, read.cgroup_tasks) == (4096, 1.5, 64)
    assert (read.huge_pages, read.nodes) == ("never", 3)

    divided = tmp_path / "divided"
    write(
        divided,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/docker/x\n",
            "proc/meminfo": "MemTotal:  1000 kB\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/pids/pids.max": "max\n",
        },
    )
    read = machine.read_limits(0, divided)
    assert (read.cgroup_memory, read.cgroup_processors, read.cgroup_tasks) == (8192, None, None)

    read = machine.read_limits(0, tmp_path / "nothing")
    assert (read.memory, read.cgroup_memory, read.nodes, read.huge_pages) == (0, None, 1, "")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "warning"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": "note"},
        ),
        (
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "warning"},
        ),
        ({"RANK": "0"}, {"torch.distributed": "warning"}),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            {"LOCAL_WORLD_SIZE": "warning"},
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
            | {"LOCAL_WORLD_SIZE": "4"},
            {},
        ),
    ],
)
def test_environments(variables: dict[str, str], expected: dict[str, str]) -> None:
    assert found(software.environment(variables)) == expected


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (software.torch_release("2.13.1+cu130"), "good"),
        (software.torch_release("2.9.0"), "good"),
        (software.torch_release("2.14.0a0"), "warning"),
        (software.torch_release("2.8.1"), "warning"),
        (software.kernel("6.8.0-31-generic", "#1 SMP"), "good"),
        (software.kernel("5.15.0", "#1 SMP"), "note"),
        (software.kernel("4.18.0-553.el8", "#1 SMP"), "note"),
        (software.kernel("4.4.0", "#1 SMP Sun Jan 10 15:06:54 PST 2016"), "warning"),
        (software.framework("lightning", "2.6.2", ">=2.6,<2.7", "m"), "good"),
        (software.framework("lightning", "2.7.0", ">=2.6,<2.7", "m"), "warning"),
        (software.framework("lightning", "2.5.9", "<2.7,>=2.6", "m"), "warning"),
    ],
)
def test_versions(finding: Finding, level: str) -> None:
    assert finding.level == level
    assert bool(finding.advice) == (level != "good")


def test_the_ranges_of_frameworks_are_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = software.importlib.metadata
    requirements = [
        "torch==2.13.*",
        'rich>=13; extra == "cli"',
        'accelerate<2,>=1.15; extra == "accelerate"',
        'accelerate<2,>=1.15; extra == "transformers"',
        'transformers<6,>=5.20; extra == "transformers"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    versions = {"accelerate": "1.14", "transformers": "5.23.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert found(software.frameworks()) == {"accelerate": "warning", "transformers": "good"}


def test_the_version_of_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert software.driver_version(file) == ""
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert software.driver_version(file) == "535.104.05"
