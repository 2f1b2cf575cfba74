// The native threads of an engine.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "mutex.h"

namespace pyckpt {

// A fixed number of named threads that run tasks in the order they were given. Tasks must not
// throw. `submit` may be called from any thread.
class IoThreads {
 public:
  // They are called by that name and their number, of 15 characters at most.
  explicit IoThreads(size_t count, const char* name = "pyckpt-io");
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;
  ~IoThreads() { stop(); }

  // Returns false, and does nothing, after `stop`.
  bool submit(std::function<void()> task);
  // Runs what was submitted, then joins. Must not be called from a task.
  void stop();

  size_t count() const { return count_; }

 private:
  void run();

  const size_t count_;

  Mutex mutex_;
  Condition submitted_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;

  std::vector<std::thread> threads_;  // last: they use what stands above
};

}  // namespace pyckpt
