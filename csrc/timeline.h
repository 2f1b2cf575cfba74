// What each thread did when: recorded while someone records, for pictures of a save or a load.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "nvtx.h"

namespace pyckpt {

// A piece of work, in nanoseconds of CLOCK_MONOTONIC.
struct TimelineSpan {
  const char* name;
  int64_t begin_ns;
  int64_t end_ns;
  uint64_t bytes;
};

// The work of one thread, in the order in which it ended.
struct TimelineTrack {
  pid_t thread;
  std::string name;  // of the thread
  std::vector<TimelineSpan> spans;
  uint64_t dropped;  // spans for which there was no room
};

// The recording of this process. While there is none, a span costs one relaxed load. While there is
// one, each thread writes to memory of its own, without a lock, but for its first span.
class Timeline {
 public:
  // How many spans a thread records, at most.
  static constexpr size_t kMaxSpans = 1 << 20;

  // The number of the recording that runs; 0: none does.
  static uint64_t recording() { return recording_.load(std::memory_order_relaxed); }

  // Begins a recording. Returns false, and does nothing, if one runs.
  static bool start();
  // Ends it and returns what was recorded: all spans that have ended, of threads that have any. A
  // span that ends while this runs may or may not be there.
  static std::vector<TimelineTrack> stop();

  // Adds to the calling thread's track; nothing, if that recording has ended. Never throws.
  static void add(uint64_t recording, const TimelineSpan& span) noexcept;

 private:
  static std::atomic<uint64_t> recording_;
  static const int fork_handler_;
};

// A span of the calling thread, from here to the end of the block: an NVTX range, and a part of the
// recording if one runs. `name` must stay.
class Span {
 public:
  Span(const char* name, uint64_t bytes)
      : range_(name, bytes), name_(name), bytes_(bytes), recording_(Timeline::recording()) {
    if (recording_ != 0) begin_ns_ = now_ns();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() {
    if (recording_ != 0) Timeline::add(recording_, {name_, begin_ns_, now_ns(), bytes_});
  }

 private:
  static int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

  const NvtxRange range_;
  const char* const name_;
  const uint64_t bytes_;
  const uint64_t recording_;
  int64_t begin_ns_ = 0;
};

}  // namespace pyckpt
