#include "peer_job.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "error.h"

namespace pyckpt {
namespace {

// Of a unit: large enough that the call costs nothing, small enough that all threads have work.
constexpr uint64_t kUnit = 4 << 20;
constexpr size_t kVectorsMax = 512;  // of a call; the kernel takes 1024

// Lets one call copy several ranges, and goes on where it stopped: it may stop short of the end.
void read_all(pid_t process, std::vector<iovec> to, std::vector<iovec> from) {
  size_t at = 0;
  while (at < to.size()) {
    const ssize_t got = ::process_vm_readv(process, &to[at], to.size() - at, &from[at],
                                           from.size() - at, /*flags=*/0);
    if (got <= 0) {
      throw IoError(
          got < 0 ? errno : EFAULT, "process_vm_readv", "",
          std::to_string(from[at].iov_len) + " bytes of process " + std::to_string(process));
    }
    auto left = static_cast<size_t>(got);
    while (at < to.size() && left >= to[at].iov_len) left -= to[at++].iov_len;
    if (left == 0) continue;
    to[at] = {static_cast<std::byte*>(to[at].iov_base) + left, to[at].iov_len - left};
    from[at] = {static_cast<std::byte*>(from[at].iov_base) + left, from[at].iov_len - left};
  }
}

}  // namespace

void PeerJob::add(pid_t process, uint64_t address, std::byte* to, uint64_t size) {
  for (uint64_t begin = 0; begin < size; begin += kUnit) {
    ranges_.push_back({process, address + begin, to + begin, std::min(kUnit, size - begin)});
  }
}

void PeerJob::run() {
  try {
    rethrow_if_failed();
    cut();
    const size_t tasks = std::min(units_.size(), threads_->count());
    for (size_t i = 0; i < tasks; ++i) {
      threads_->submit([job = shared_from_this()] { job->work(); });
    }
  } catch (...) {
    fail(std::current_exception());
  }
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) {
    return active_ == 0 && (error_ || next_ == units_.size());
  });
  end_clock();
  // A task that comes to run later finds an error, or no unit.
  next_ = 0;
  units_.clear();
  ranges_.clear();
  if (error_) std::rethrow_exception(error_);
}

void PeerJob::cut() {
  uint64_t size = 0;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const Range& range = ranges_[i];
    const bool joins = !units_.empty() && size + range.size <= kUnit &&
                       i - units_.back().begin < kVectorsMax &&
                       ranges_[i - 1].process == range.process;
    if (joins) {
      units_.back().end = i + 1;
      size += range.size;
    } else {
      units_.push_back({i, i + 1});
      size = range.size;
    }
  }
}

// Copies one unit after another, until there is none.
void PeerJob::work() noexcept {
  Lock lock(mutex_);
  while (!error_ && next_ < units_.size()) {
    const Unit unit = units_[next_++];
    ++active_;
    lock.unlock();
    try {
      std::vector<iovec> to, from;
      uint64_t size = 0;
      for (size_t i = unit.begin; i < unit.end; ++i) {
        const Range& range = ranges_[i];
        to.push_back({range.to, range.size});
        from.push_back({reinterpret_cast<void*>(range.address), range.size});
        size += range.size;
      }
      const Span span("copy from a peer", size);
      read_all(ranges_[unit.begin].process, std::move(to), std::move(from));
    } catch (...) {
      fail(std::current_exception());
    }
    lock.lock();
    --active_;
    changed_.notify_all();
  }
}

bool let_peers_read(bool allowed) {
  return ::prctl(PR_SET_PTRACER, allowed ? PR_SET_PTRACER_ANY : 0UL, 0UL, 0UL, 0UL) == 0;
}

}  // namespace pyckpt
