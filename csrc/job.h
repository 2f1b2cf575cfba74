// What jobs of an engine have in common: one sticky error, and the clocks.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>

#include "mutex.h"
#include "timeline.h"

namespace pyckpt {

using Clock = std::chrono::steady_clock;

// Work that threads of an engine do for one caller. The first error anywhere stops all of it, and
// is what every later call throws.
class Job {
 public:
  Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  virtual ~Job() = default;

  // Whether this is a child of the process that the job runs in: its threads are not here, its
  // locks may be held for good, and its file is the parent's. Such a job is not to be used, nor
  // destroyed.
  bool forked() const;

  // Fails the job, from any thread. Only the first error counts.
  void fail(std::exception_ptr error) noexcept;

  bool has_failed() const { return failed_.load(std::memory_order_acquire); }

 protected:
  void rethrow_if_failed();
  // Stops the clock that `seconds` reads.
  void end_clock();
  double seconds() const;

  mutable Mutex mutex_;
  // Something that a thread may wait for came about; every wait looks at error_ too.
  Condition changed_;
  std::exception_ptr error_ GUARDED_BY(mutex_);

 private:
  const pid_t process_;
  const Clock::time_point started_;
  std::atomic<bool> failed_{false};    // error_ is set; spares a look under the lock
  std::atomic<int64_t> total_ns_{-1};  // -1 while it runs
};

// Seconds that several threads spent on one thing, added up. Each lap is a span of that name.
class Stopwatch {
 public:
  explicit Stopwatch(const char* name) : name_(name) {}

  double seconds() const { return static_cast<double>(nanoseconds_.load()) * 1e-9; }

  // Measures while it lives.
  class Lap {
   public:
    Lap(Stopwatch* watch, uint64_t bytes)
        : span_(watch->name_, bytes), watch_(watch), start_(Clock::now()) {}
    Lap(const Lap&) = delete;
    Lap& operator=(const Lap&) = delete;
    ~Lap() {
      const std::chrono::nanoseconds passed = Clock::now() - start_;
      watch_->nanoseconds_.fetch_add(passed.count(), std::memory_order_relaxed);
    }

   private:
    const Span span_;
    Stopwatch* const watch_;
    const Clock::time_point start_;
  };

 private:
  const char* const name_;
  std::atomic<int64_t> nanoseconds_{0};
};

}  // namespace pyckpt
