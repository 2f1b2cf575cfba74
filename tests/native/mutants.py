"""Takes the waits of the CUDA path out, one at a time, and sees that a native test notices.

Each mutant is csrc with one place changed, built without optimisation and run against cuda_tests
and the native tests of staging. A test that fails, crashes or hangs has found it. Exits with 1
where a mutant lives, or where the place that it changes is not there any more.

    python3 tests/native/mutants.py [name ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / "native" / "mutants"
FILTER = (
    "StageCuda*:IoCuda*:StreamCuda*:ErrorCuda*:CaptureCuda*:RegisterCuda*:PackCuda*:"
    "StageJob*:TransferBatch*"
)
# A mutant that hangs is given up after this; the tests themselves take a few seconds.
TIMEOUT_S = 90


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str = ""


MUTANTS = (
    # device_cuda.cpp, and the cuda_*.h that it is made of
    Mutant(
        "follow: the copies to the host do not wait",
        "device_cuda.cpp",
        'check(cudaStreamWaitEvent(to_host_.get(), event.get(), 0), "cudaStreamWaitEvent");',
    ),
    Mutant(
        "follow: the copies from the host do not wait",
        "device_cuda.cpp",
        'check(cudaStreamWaitEvent(from_host_.get(), event.get(), 0), "cudaStreamWaitEvent");',
    ),
    Mutant(
        "follow: its event is not recorded",
        "device_cuda.cpp",
        'check(cudaEventRecord(event.get(), program), "cudaEventRecord");',
    ),
    Mutant(
        "follow: a capture is not noticed",
        "device_cuda.cpp",
        "if (is_capturing(program)) {",
        "if (false) {",
    ),
    Mutant(
        "hold: the program does not wait",
        "device_cuda.cpp",
        'check(cudaStreamWaitEvent(program, copies.event(), 0), "cudaStreamWaitEvent");',
        "(void)copies;",
    ),
    Mutant(
        "hold: a stream that captures is to wait",
        "device_cuda.cpp",
        "if (is_capturing(program)) return;",
    ),
    Mutant(
        "captures are ended",
        "cuda_entry.h",
        "const cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode_);",
        "const cudaError_t status = cudaSuccess;",
    ),
    Mutant(
        "threads stay in another mode of capture",
        "cuda_entry.h",
        "    ignore(cudaThreadExchangeStreamCaptureMode(&mode_));\n",
    ),
    Mutant(
        "a use of CUDA within another leaves its own device",
        "cuda_entry.h",
        "    if (outer_ != kNoDevice && outer_ != index_) ignore(cudaSetDevice(outer_));\n",
    ),
    Mutant(
        "a ticket is not recorded",
        "device_cuda.cpp",
        "ticket->record(stream);",
    ),
    Mutant(
        "a ticket is recorded before its copies",
        "device_cuda.cpp",
        "queue(transfers, kind, stream);\n      ticket->record(stream);",
        "ticket->record(stream);\n      queue(transfers, kind, stream);",
    ),
    Mutant(
        "a ticket does not wait",
        "device_cuda.cpp",
        'check(cudaEventSynchronize(event_.get()), "cudaEventSynchronize");',
    ),
    Mutant(
        "a ticket waits without a current device",
        "device_cuda.cpp",
        "    const Entry entry(index_);\n    check(cudaEventSynchronize",
        "    check(cudaEventSynchronize",
    ),
    Mutant(
        "memory is let go before its stream is done",
        "device_cuda.cpp",
        "    ignore(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));\n",
        "    (void)stream;\n",
    ),
    Mutant(
        "memory is registered without a current device",
        "device_cuda.cpp",
        "  const Entry entry(device);\n  // Portable",
        "  (void)device;\n  // Portable",
    ),
    Mutant(
        "things are given back without a current device",
        "cuda_entry.h",
        "    const Entry entry(index);\n    function();",
        "    (void)index;\n    function();",
    ),
    Mutant(
        "prewarm makes no streams",
        "device_cuda.cpp",
        "    make_queues();\n    events_->fill(kEventsAtFirst);",
        "    events_->fill(kEventsAtFirst);",
    ),
    Mutant(
        "prewarm makes no events",
        "device_cuda.cpp",
        "    events_->fill(kEventsAtFirst);",
    ),
    Mutant(
        "prewarm does not load the small kernel",
        "device_cuda.cpp",
        'check(load_pack(kPackTransfersSmall), "loading the kernel that packs small copies");',
    ),
    Mutant(
        "prewarm does not load the large kernel",
        "device_cuda.cpp",
        "ignore(load_pack(kPackTransfers));",
    ),
    Mutant(
        "copies go across registrations",
        "device_cuda.cpp",
        "cut(transfer, host, kRegistrationPiece, &pieces);",
        "pieces.push_back(transfer);\n        (void)host;",
    ),
    Mutant(
        "a block makes a copy alone",
        "device_cuda.cpp",
        "cut(transfer, transfer.to, kPackChunk, &small);",
        "small.push_back(transfer);",
    ),
    Mutant(
        "a driver that takes few parameters is an error",
        "device_cuda.cpp",
        "if (count > kPackTransfersSmall && is_refused(status)) {",
        "if (false) {",
    ),
    Mutant(
        "a refused launch leaves its error",
        "device_cuda.cpp",
        "        cudaGetLastError();\n        pack_capacity_",
        "        pack_capacity_",
    ),
    Mutant(
        "the device is not made the current one",
        "cuda_entry.h",
        'check(cudaSetDevice(index), "cudaSetDevice");',
        "(void)index;",
    ),
    Mutant(
        "a ticket spins",
        "cuda_event.h",
        "cudaEventDisableTiming | cudaEventBlockingSync",
        "cudaEventDisableTiming",
    ),
    Mutant(
        "an error leaves copies behind",
        "device_cuda.cpp",
        "ignore(cudaStreamSynchronize(stream));",
    ),
    Mutant(
        "copies are ordered with the default stream",
        "cuda_stream.h",
        "stream_, cudaStreamNonBlocking",
        "stream_, cudaStreamDefault",
    ),
    Mutant(
        "copies go into memory that is not registered",
        "device_cuda.cpp",
        "    prepare_();\n",
    ),
    Mutant(
        "an event is not used again",
        "cuda_event.h",
        "free_.push_back(event);",
        "cudaEvent_t kept = event;\n    (void)kept;",
    ),
    Mutant(
        "only the first small copies are launched",
        "device_cuda.cpp",
        "for (size_t i = 0; i < small.size();) {",
        "for (size_t i = 0; i < std::min(small.size(), kPackTransfers);) {",
    ),
    # pinned_buffer.cpp, arena.cpp
    Mutant(
        "memory is registered before its pages are there",
        "pinned_buffer.cpp",
        "  populate(registered, size_ - registered);",
    ),
    Mutant(
        "what is prewarmed is not registered",
        "pinned_buffer.cpp",
        "  } while (register_piece());",
        "  } while (false);",
    ),
    Mutant(
        "two threads register one piece",
        "pinned_buffer.cpp",
        "bool PinnedBuffer::register_piece() {\n  const Lock lock(pinning_);\n"
        "  if (registered_ == size_) return false;",
        "bool PinnedBuffer::register_piece() {\n  if (registered_ == size_) return false;",
    ),
    Mutant(
        "the engine is locked while copies are queued",
        "engine.cpp",
        "  std::shared_ptr<StageJob> job =\n"
        "      StageJob::start(arena_.get(), staging_threads_.get(), sources, "
        "std::move(options));\n"
        "  const Lock lock(mutex_);\n",
        "  const Lock lock(mutex_);\n"
        "  std::shared_ptr<StageJob> job =\n"
        "      StageJob::start(arena_.get(), staging_threads_.get(), sources, "
        "std::move(options));\n",
    ),
    Mutant(
        "closing an engine does not wait for what it prewarms",
        "engine.cpp",
        "  if (warming != nullptr) warming->stop();\n",
    ),
    Mutant(
        "what is prewarmed goes on when the engine is closed",
        "engine.cpp",
        "const auto goes_on = [this] { return !closed(); };",
        "const auto goes_on = [] { return true; };",
    ),
    Mutant(
        "memory is registered in one piece",
        "pinned_buffer.cpp",
        "const size_t end = piece_end(registered_);",
        "const size_t end = size_;",
    ),
    Mutant(
        "only the first piece is given back",
        "pinned_buffer.cpp",
        "at < registered_; at = piece_end(at)",
        "at < registered_; at = size_",
    ),
    Mutant(
        "an arena that registers answers nobody",
        "arena.cpp",
        "  if (pin_device != kNoDevice) region->segment_->pin(pin_device);",
        "  const Lock lock(mutex_);\n"
        "  if (pin_device != kNoDevice) region->segment_->pin(pin_device);",
    ),
    Mutant(
        "an arena that reserves answers nobody",
        "arena.cpp",
        "    for (const auto& buffer : buffers) buffer->pin(pin_device);",
        "    const Lock still(mutex_);\n"
        "    for (const auto& buffer : buffers) buffer->pin(pin_device);",
    ),
    Mutant(
        "nobody waits for memory that is being made",
        "arena.cpp",
        "while (!region && growing_) {",
        "while (false) {",
    ),
    # stage_job.cpp, device_copies.cpp, engine.cpp
    Mutant(
        "the program is not held for what is not guarded",
        "stage_job.cpp",
        "    job->device_copies_.hold(device, stream);\n",
    ),
    Mutant(
        "the guard does not hold",
        "stage_job.cpp",
        "  try {\n    device_copies_.hold(device, stream);\n",
        "  try {\n    (void)device, (void)stream;\n",
    ),
    Mutant(
        "the guard is for the first ticket",
        "device_copies.cpp",
        "newest->second = ticket;",
    ),
    Mutant(
        "a guard that cannot be set is not told",
        "stage_job.cpp",
        "    device_copies_.hold(device, stream);\n  } catch (...) {\n"
        "    fail(std::current_exception());",
        "    device_copies_.hold(device, stream);\n  } catch (...) {",
    ),
    Mutant(
        "a copy beside which a guard failed counts",
        "stage_job.cpp",
        "  rethrow_if_failed();  // a guard that failed meanwhile",
        "  // a guard that failed meanwhile",
    ),
    Mutant(
        "a copy is not waited for",
        "stage_job.cpp",
        "    staged->ticket_->wait();",
    ),
    Mutant(
        "a job that is dropped does not wait",
        "stage_job.cpp",
        "  device_copies_.wait_for_devices();  // but for no thread",
        "  // but for no thread",
    ),
    Mutant(
        "devices are not waited for",
        "device_copies.cpp",
        "      ticket->wait();",
        "      (void)ticket;",
    ),
    Mutant(
        "threads are not waited for",
        "stage_job.cpp",
        "    changed_.wait(lock, [this]() REQUIRES(mutex_) { return units_left_ == 0; });\n  }\n"
        "  device_copies_.wait_for_devices();",
        "  }\n  device_copies_.wait_for_devices();",
    ),
    Mutant(
        "sources go while they are read",
        "stage_job.cpp",
        "void StageJob::release_sources() noexcept {\n  quiesce();",
        "void StageJob::release_sources() noexcept {",
    ),
    Mutant(
        "units are copied although the job has failed",
        "stage_job.cpp",
        "if (!has_failed()) {\n    try {",
        "{\n    try {",
    ),
    Mutant(
        "copies are made by threads that a disk can hold up",
        "engine.cpp",
        "StageJob::start(arena_.get(), staging_threads_.get(), sources",
        "StageJob::start(arena_.get(), threads_.get(), sources",
    ),
    Mutant(
        "wait_volatile does not wait",
        "stage_job.cpp",
        "  do_units(volatile_units_);\n  Lock lock(mutex_);\n"
        "  changed_.wait(lock, [this]() REQUIRES(mutex_) { "
        "return error_ || volatile_left_ == 0; });",
        "  Lock lock(mutex_);",
    ),
    Mutant(
        "wait_host does not wait",
        "stage_job.cpp",
        "  do_units(host_copies_.units());\n  Lock lock(mutex_);\n"
        "  changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || units_left_ == 0; });",
        "  Lock lock(mutex_);",
    ),
    Mutant(
        "who waits does not help",
        "stage_job.cpp",
        "  do_units(volatile_units_);\n  Lock",
        "  Lock",
    ),
    Mutant(
        "regions are given back while they are written to",
        "stage_job.cpp",
        "void StageJob::release_regions() noexcept {\n  quiesce();",
        "void StageJob::release_regions() noexcept {",
    ),
    Mutant(
        "wait does not wait for devices",
        "stage_job.cpp",
        "  device_copies_.wait();",
    ),
    Mutant(
        "a batch does not wait",
        "transfer_batch.cpp",
        "      ticket->wait();",
        "      (void)ticket;",
    ),
    Mutant(
        "a batch leaves what is beside an error",
        "transfer_batch.cpp",
        "      error = std::current_exception();",
        "      throw;",
    ),
    Mutant(
        "a batch leaves what was queued before an error",
        "transfer_batch.cpp",
        "    try {\n      wait();\n    } catch (...) {",
        "    try {\n    } catch (...) {",
    ),
    # fill_job.cpp, stream_job.cpp
    Mutant(
        "a window goes out before its copies are over",
        "fill_job.cpp",
        "  batch.start_to_host();\n  batch.wait();",
        "  batch.start_to_host();",
    ),
    Mutant(
        "what is taken is copied by devices into memory that is not registered",
        "stream_job.cpp",
        "if (!comes_from_device(window)) {",
        "if (true) {",
    ),
    Mutant(
        "a job ends before the last window is taken",
        "fill_job.cpp",
        "return active_ == 0 && (error_ || ready_.empty()); });",
        "return error_ || ready_.empty(); });",
    ),
    Mutant(
        "a job is abandoned while a window is taken",
        "fill_job.cpp",
        "  changed_.wait(lock, [this]() REQUIRES(mutex_) { return active_ == 0; });",
    ),
    Mutant(
        "a slot is read into before its copy is over",
        "read_job.cpp",
        "oldest.front().batch.wait();",
    ),
    Mutant(
        "a read ends before its copies",
        "read_job.cpp",
        "    if (landings_.empty()) break;",
        "    if (all_read()) break;",
    ),
    Mutant(
        "a thread waits for its copies before it reads on",
        "read_job.cpp",
        "  batch.start_from_host();",
        "  batch.start_from_host();\n  batch.wait();",
    ),
    Mutant(
        "a staged payload is written before it is there",
        "fill_job.cpp",
        "  if (source.staged) source.staged->wait();",
    ),
    Mutant(
        "a staged payload is written in place before it is there",
        "write_job.cpp",
        "if (piece.item->source.staged) piece.item->source.staged->wait();",
    ),
)


def make(source: Path) -> bool:
    """Builds the tests from that csrc; only what changed is compiled."""
    command = ["make", "-s", "-C", str(HERE), f"-j{os.cpu_count()}", "build"]
    command += [f"CSRC={source}", f"OUT={WORK / 'out'}", "FLAGS_plain=-O0 -Wno-error"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode == 0


def first_failure() -> str:
    """What the tests say against what was built; empty where they pass."""
    environment = dict(os.environ, TEST_HANG_SECONDS="5")
    for program in ("cuda_tests", "native_tests"):
        command = [str(WORK / "out" / program), "--gtest_brief=1", "--gtest_fail_fast"]
        command.append(f"--gtest_filter={FILTER}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"{program} hangs"
        if done.returncode == 0:
            continue
        for line in (done.stdout + done.stderr).splitlines():
            if line.startswith(("[  FAILED  ]", "HANGS:")):
                return line.split(maxsplit=3)[-1] if line.startswith("[") else line
        return f"{program} ends with {done.returncode}"
    return ""


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    shutil.rmtree(WORK / "csrc", ignore_errors=True)
    # As files of now: what an earlier run built of a mutant must not pass for newer than they are.
    shutil.copytree(ROOT / "csrc", WORK / "csrc", copy_function=shutil.copy)
    if not make(WORK / "csrc"):
        return 1
    if not (WORK / "out" / "cuda_tests").exists():
        print("the headers of the CUDA runtime are needed")
        return 1
    if failure := first_failure():
        print(f"without any change: {failure}")
        return 1
    alive = 0
    for mutant in chosen:
        path = WORK / "csrc" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            found = f"NOT APPLICABLE: the text is there {text.count(mutant.old)} times"
            alive += 1
        else:
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                found = first_failure() if make(WORK / "csrc") else "NOT BUILT"
            finally:
                path.write_text(text)
            if not found or found == "NOT BUILT":
                alive += 1
        print(f"{mutant.name}: {found or 'LIVES'}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants found")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
