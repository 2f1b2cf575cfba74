"""The GPU suite where there is no GPU: its code runs, and it says that it measured nothing."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("gpu_steps")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_the_benchmark_walks_through_its_code_without_a_gpu(tmp_path: Path, gpu: Any) -> None:
    results = tmp_path / "results"
    done = run(
        sys.executable,
        ROOT / "benchmarks" / "gpu.py",
        "--cpu",
        *("--dir", tmp_path / "scratch", "--results", results),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out for want of time" not in done.stdout
    for section in gpu.SECTIONS:
        assert f"\n{section}: passed" in done.stdout
    assert done.stdout.count("NOTHING") == 2
    assert not results.exists()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    benchmark = run(sys.executable, ROOT / "benchmarks" / "gpu.py")
    assert benchmark.returncode == 1
    assert benchmark.stdout.startswith("no GPU")
    suite = run("bash", ROOT / "scripts" / "gpu.sh", PYTHON=sys.executable)
    assert suite.returncode == 1
    assert "needs a GPU" in suite.stderr
    assert "finds no GPU" in suite.stderr


def test_the_plan_fits_and_leaves_nothing_out(steps: Any, gpu: Any) -> None:
    """Commands of ten minutes and half an hour in all, as the README has them, word for word."""
    readme = (ROOT / "scripts" / "README.md").read_text()
    pattern = "^scripts/gpu.sh --within (.*)"
    lines = [line.split() for line in re.findall(pattern, readme, re.MULTILINE)]
    assert len(lines) == 3
    within, commands = [float(line[0]) for line in lines], [line[1:] for line in lines]
    limits = [sum(steps.STEPS[name].limit_s for name in command) for command in commands]
    assert max(within) < 600
    # Or the last step would have less than its own limit.
    assert all(limit <= most - 10 for limit, most in zip(limits, within, strict=True))
    assert sum(limits) < 1800
    assert max(step.limit_s for step in steps.STEPS.values()) <= 180
    assert {name for command in commands for name in command} == set(steps.STEPS)
    assert set(gpu.SECTIONS) == {n for n, step in steps.STEPS.items() if step.writes_results}
    for name, step in steps.STEPS.items():
        assert f"| `{name}` | {step.limit_s} s | {step.about_s} s |" in readme
        # What it is reckoned to take, starting Python included, leaves a section to its end.
        if step.writes_results:
            assert step.about_s <= steps.measuring_seconds(step.limit_s) + 10
        assert step.about_s < step.limit_s


def test_a_step_that_is_cut_off_keeps_what_it_said(steps: Any, tmp_path: Path) -> None:
    """Also where it started others, which hold its output open and would go on."""
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    command = ["bash", "-c", 'echo so far; (trap "" TERM; read < "$0") & read < "$0"', str(fifo)]
    assert steps.run_limited(command, 3.0) == (None, ["so far"])
    assert steps.run_limited(["bash", "-c", "echo all; exit 3"], 600.0) == (3, ["all"])


def test_each_step_leaves_what_became_of_it(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "described", lambda setting: {"commit": "abc"})
    setting = steps.Setting(sys.executable, tmp_path, False, "9.0", tmp_path / "no toolkit")

    def outcome(name: str, command: list[str]) -> Any:
        step = steps.Step(60, 1, "", lambda setting, seconds: command)
        said = steps.run(name, step, setting, 60.0)
        content = json.loads((tmp_path / f"gpu-{name}.json").read_text())
        assert content["state"] == said
        assert content["machine"] == {"commit": "abc"}
        return content

    assert outcome("good", ["echo", "yes"])["output"] == ["yes"]
    assert outcome("bad", ["bash", "-c", "echo no; exit 4"])["exit_code"] == 4
    monkeypatch.setenv("PATH", str(tmp_path))
    assert steps.run("kernel", steps.STEPS["kernel"], setting, 60.0) == "not run"
    assert "nvcc is neither in" in (tmp_path / "gpu-kernel.json").read_text()


def test_a_step_takes_what_it_left_from_the_disk(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a save, too; and what another benchmark has there stays."""
    monkeypatch.setattr(steps, "SCRATCH", tmp_path)
    (tmp_path / "pyckpt-other").mkdir()
    setting = steps.Setting(sys.executable, tmp_path, True, "9.0", tmp_path)
    never = tmp_path / "never"
    os.mkfifo(never)
    script = 'mkdir "$0/pyckpt-left"; echo half > "$0/pyckpt-left/file"; read < "$0/never"'
    step = steps.Step(60, 1, "", lambda setting, seconds: ["bash", "-c", script, str(tmp_path)])
    assert steps.run("save", step, setting, 2.0) == "cut off"
    assert [path.name for path in tmp_path.glob("pyckpt-*")] == ["pyckpt-other"]


def test_what_measured_a_part_only_has_not_passed(steps: Any, tmp_path: Path) -> None:
    setting = steps.Setting(sys.executable, tmp_path, True, "9.0", tmp_path)
    command = ["bash", "-c", f"exit {steps.INCOMPLETE}"]
    for writes, outcome in ((True, "incomplete"), (False, "failed")):
        step = steps.Step(60, 1, "", lambda setting, seconds: command, writes_results=writes)
        assert steps.run("part", step, setting, 60.0) == outcome


def test_the_toolkit_is_where_nvcc_is(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in ("usual", "other"):
        nvcc = tmp_path / home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
    assert steps.find_toolkit(tmp_path / "usual") == tmp_path / "usual"
    assert steps.find_toolkit(tmp_path / "absent") == tmp_path / "other"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert steps.find_toolkit(tmp_path / "absent") == tmp_path / "absent"


def test_a_sanitizer_that_hangs_is_not_run(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a probe of it gets no rounds of the kernel to run."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    kernel = tmp_path / "check_pack"
    kernel.touch()
    monkeypatch.setattr(steps, "KERNEL", kernel)
    monkeypatch.setattr(steps, "_PROBE_S", 1.0)
    setting = steps.Setting(sys.executable, tmp_path, False, "9.0", tmp_path)
    os.mkfifo(tmp_path / "never")
    tool.write_text(f'#!/bin/bash\nread < "{tmp_path}/never"\n')
    tool.chmod(0o755)
    with pytest.raises(steps.NotRun, match="did not come"):
        steps.STEPS["sanitizer"].command(setting, 60.0)
    tool.write_text('#!/bin/bash\necho "$@" >> "$(dirname "$0")/seen"\n')
    steps.STEPS["sanitizer"].command(setting, 60.0)
    assert (tool.parent / "seen").read_text() == f"--tool memcheck {kernel} 0\n"


def test_a_section_that_is_cut_off_has_written_its_figures(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu-staging.json"

    def seen() -> Any:
        return json.loads(output.read_text())

    def section(setting: Any) -> None:
        setting.report.add("staging", {"pyckpt": [{"seconds": 1.5}]})
        # A kill that nothing can catch would find this.
        assert seen()["state"] == "cut off"
        assert seen()["results"]["staging"]["pyckpt"]["seconds"]["samples"] == [1.5]
        raise gpu.CutOff

    monkeypatch.setitem(gpu.SECTIONS, "staging", section)
    report = gpu.SectionReport("gpu-staging", {}, {"date": "now"}, output=output)
    device = torch.device("cpu")
    setting = gpu.Setting(report, tmp_path, device, gpu.SMOKE, deadline=0.0, traces=report.traces)
    report.state = gpu.run_section("staging", setting)
    report.finish(output)
    assert report.state == seen()["state"] == "cut off"
    assert "cut off" in seen()["notes"][0]


def test_no_state_goes_where_shared_memory_has_no_room(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = importlib.import_module("_gpu_common")
    monkeypatch.setattr(common, "shared_memory_free", lambda: 1000)
    report = gpu.SectionReport("gpu", {}, {})
    setting = gpu.Setting(report, tmp_path, torch.device("cpu"), gpu.SMOKE, deadline=0.0)
    assert setting.shared_memory_for(700, 1, "it")
    assert not setting.shared_memory_for(900, 1, "it")
    assert "it: without shared memory: /dev/shm has" in report.notes[0]
    monkeypatch.setattr(common, "files_at_most", lambda: 1024)
    assert setting.shared_memory_for(700, 300, "it")
    assert not setting.shared_memory_for(700, 500, "it")
    assert "may have 1,024 files" in report.notes[1]


def test_the_benchmark_may_have_as_many_files_as_it_is_allowed(gpu: Any) -> None:
    import resource

    common = importlib.import_module("_gpu_common")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(300, before[1]), before[1]))
        assert common.files_at_most() <= 300
        gpu.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def setting(gpu: Any, tmp_path: Path) -> Any:
    """Of a walk on the CPU, with time enough."""
    report = gpu.SectionReport("gpu", {}, {}, output=tmp_path / "gpu.json")
    device, end = torch.device("cpu"), time.monotonic() + 600
    return gpu.Setting(report, tmp_path, device, gpu.SMOKE, end, traces=report.traces)


def test_a_stager_that_fails_takes_nothing_of_ours(
    gpu: Any, setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours has its figures and targets in the file before any other's is made."""
    speed = importlib.import_module("_gpu_speed")

    class Fails:
        def __init__(self, options: Any) -> None:
            content = json.loads(setting.report.output.read_text())
            assert set(content["results"]["staging small"]) == {speed.BARE, speed.OURS}
            assert content["targets"]
            self.closed = False

        def stage(self, state: Any) -> Any:
            raise OSError("[Errno 24] Too many open files")

        def close(self) -> None:
            pass

    monkeypatch.setattr(speed, "DefaultStagers", Fails)
    monkeypatch.setitem(gpu.SECTIONS, "staging-small", speed.measure_staging_small)
    assert gpu.run_section("staging-small", setting) == "passed"
    assert sum("Too many open files" in note for note in setting.report.notes) == 2
    assert "staging small" in setting.report.results


def test_a_saver_that_fails_is_a_note_and_the_next_one_has_its_turn(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = importlib.import_module("_gpu_common")
    made: list[str] = []
    monkeypatch.setattr(setting, "rival", lambda: made.append("rival"))
    seen: list[str] = []

    def measure(peer: Any) -> None:
        seen.append(peer.name)
        if len(seen) == 1:
            raise ValueError("not here")

    setting.beside(100, 2, "training", 1.0, measure)
    assert seen == [common.StockDefaultStager.name, common.Stock.name]
    assert made == ["rival"]
    assert any("ValueError: not here" in note for note in setting.report.notes)
    # Without time none is made, nor are its processes.
    setting.beside(100, 2, "training", 1e6, measure)
    assert len(made) == 1
    assert len(seen) == 2


def test_training_has_ours_where_there_is_time_for_nothing_else(setting: Any) -> None:
    training = importlib.import_module("_gpu_training")
    setting.deadline = 0.0
    training.measure_training(setting)
    assert set(setting.report.results["training"]) == {training.OURS}
    assert all(target.value is not None for target in setting.report.targets)
    noise = setting.report.results["training, noise"]
    assert all(spreads["noise_steps"].median >= 0 for spreads in noise.values())
    left_out = [note for note in setting.report.notes if note.startswith("left out for want")]
    assert sum("training by" in note for note in left_out) == 1  # ours once more


def test_what_the_guard_has_no_time_for_is_no_pass(gpu: Any, setting: Any) -> None:
    correctness = importlib.import_module("_gpu_correctness")
    setting.deadline = time.monotonic() + correctness._COMPILER_S - 1  # for the others
    assert gpu.run_section("guard", setting) == "incomplete"
    without = [target.name for target in setting.report.targets if target.value is None]
    assert without == [
        f"step guard, {name}: checkpoints with wrong bytes"
        for name in ("compiled", "compiled step")
    ]
    assert len(setting.report.targets) == len(correctness.CASES)


def test_a_case_of_the_guard_that_raises_does_not_stop_the_others(
    gpu: Any, setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    correctness = importlib.import_module("_gpu_correctness")

    def refused(setting: Any) -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(correctness, "CASES", (refused, correctness.plain))
    assert gpu.run_section("guard", setting) == "failed"
    assert [target.value for target in setting.report.targets] == [None, 0]


def test_the_exit_codes_of_what_is_incomplete_agree(steps: Any, gpu: Any) -> None:
    assert gpu.INCOMPLETE == steps.INCOMPLETE


def test_noise_is_how_much_windows_without_a_save_differ(gpu: Any) -> None:
    training = importlib.import_module("_gpu_training")
    steady = training.Windows([[1.0] * 8, [1.0] * 8])
    assert steady.noise(30) == 0
    # Chunks of 4 steps take 4 and 5: of 4.5, 30 steps differ by 30 / 4.5.
    assert training.Windows([[1.0] * 8, [1.25] * 8]).noise(30) == pytest.approx(30 / 4.5)
    assert training.Windows([[1.0] * 8, [1.25] * 8]).idle_step() == pytest.approx(1.125)


def test_waits_are_those_of_the_thread_that_synchronised_first(gpu: Any) -> None:
    waits_of_first_thread = importlib.import_module("_gpu_training").waits_of_first_thread

    def call(at: float, thread: int, name: str, category: str = "cuda_runtime") -> dict[str, Any]:
        return {"ts": at, "tid": thread, "name": name, "cat": category}

    events = [
        {"name": "process_name"},
        call(5, 8, "cudaStreamSynchronize"),
        call(1, 7, "cudaDeviceSynchronize"),
        call(2, 8, "cudaDeviceSynchronize"),
        call(3, 7, "cudaEventSynchronize"),
        call(4, 7, "cudaMemcpyAsync"),
        call(6, 7, "cuStreamSynchronize", "cuda_driver"),
        call(7, 7, "cudaStreamSynchronize", "cpu_op"),
    ]
    found = waits_of_first_thread(events)
    assert found == {
        "cudaDeviceSynchronize": 1,
        "cudaEventSynchronize": 1,
        "cuStreamSynchronize": 1,
    }
    # Where the machine lets nobody trace, that is no zero.
    assert waits_of_first_thread([call(7, 7, "aten::add", "cpu_op")]) is None


def test_each_variant_restores_as_its_name_says(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is a fresh optimizer under another name."""
    resume = importlib.import_module("resume_syncs")
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    before = torch.optim.Adam([parameter])
    before.step()
    report = gpu.SectionReport("gpu", {}, {})
    for variant in resume.available(report):
        optimizer = torch.optim.Adam([parameter])
        resume.restore(variant, optimizer, before.state_dict(), torch.device("cpu"))
        assert bool(optimizer.state) == (variant != resume.FRESH)
    monkeypatch.setattr(resume, "version_of", lambda package: None)
    assert resume.LIGHTNING not in resume.available(report)
    assert "not installed" in report.notes[-1]


@pytest.mark.slow
def test_plots_are_made_of_the_files(gpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, traces in (("training", {"pyckpt": {"before": [1.0, 2.0]}}), ("staging-large", {})):
        report = gpu.SectionReport(f"gpu-{name}", {}, {}, traces=traces)
        report.add("staging large", {v: [{"seconds": 1.0}] for v in ("bare pinned copy", "pyckpt")})
        report.add(
            "staging large beside it", {v: [{"seconds": 1.0}] for v in ("bare pinned copy", "it")}
        )
        report.write(tmp_path / f"gpu-{name}.json")
    done = run(sys.executable, ROOT / "benchmarks" / "gpu.py", "--plots", *("--results", tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("*.png")} == {"gpu-steps.png", "gpu-staging.png"}


PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
    "operations"
)
WARNS = "import pytest, warnings\npytestmark = pytest.mark.cuda\n"
SKIPS = "import pytest\npytestmark = pytest.mark.cuda\n"


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (SKIPS + "def test_it(): pass\n", 0, "1 ran, 0 skipped"),
        (SKIPS + "def test_it(): pytest.skip('no')\n", 1, "0 ran, 1 skipped"),
        (SKIPS + "pytest.skip('no', allow_module_level=True)\n", 1, "0 ran, 1 skipped"),
        (SKIPS + "def test_it(): assert False\n", 1, "1 ran, 0 skipped"),
        ("def test_it(): pass\n", 1, "0 ran, 0 skipped"),
        (WARNS + "def test_it(): warnings.warn('of this machine')\n", 0, "1 ran, 0 skipped"),
    ],
)
def test_a_skipped_test_is_no_pass_but_a_warning_is(
    tmp_path: Path, content: str, code: int, says: str
) -> None:
    test = tmp_path / "test_content.py"
    test.write_text(content)
    done = run(
        sys.executable,
        ROOT / "scripts" / "gpu_tests.py",
        # Without the repository's conftest, which is for its own tests.
        *(
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            tmp_path,
            test,
        ),
    )
    assert says in done.stdout, done.stdout + done.stderr
    assert ("Skipped: no" in done.stdout) == ("skip(" in content)
    assert done.returncode == code


def test_packages_that_a_machine_lacks_take_no_other_tests_away(tmp_path: Path) -> None:
    for package in ("moto", "obstore", "sybil", "typer"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not on that machine')\n")
    done = run(
        *(sys.executable, ROOT / "scripts" / "gpu_tests.py"),
        *("--collect-only", "-q", "-p", "no:cacheprovider"),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_stager_cuda.py::" in done.stdout


def test_debugging_synchronisations_is_no_error() -> None:
    """Torch says this once a process, where a test first looks for them on a GPU."""
    warnings.warn(PROTOTYPE, stacklevel=1)  # raises, unless pytest is told to pass over it
