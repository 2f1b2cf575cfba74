#include "job.h"

#include <unistd.h>

#include <utility>

namespace pyckpt {

Job::Job() : process_(::getpid()), started_(Clock::now()) {}

bool Job::forked() const { return ::getpid() != process_; }

void Job::fail(std::exception_ptr error) noexcept {
  const Lock lock(mutex_);
  if (!error_) error_ = std::move(error);
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Job::rethrow_if_failed() {
  if (!has_failed()) return;
  const Lock lock(mutex_);
  std::rethrow_exception(error_);
}

void Job::end_clock() {
  total_ns_.store(std::chrono::nanoseconds(Clock::now() - started_).count());
}

double Job::seconds() const {
  const int64_t total = total_ns_.load();
  const std::chrono::nanoseconds so_far = Clock::now() - started_;
  return static_cast<double>(total >= 0 ? total : so_far.count()) * 1e-9;
}

}  // namespace pyckpt
