// The native threads of an engine.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

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

  std::mutex mutex_;
  std::condition_variable submitted_;
  // Guarded by mutex_.
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;

  std::vector<std::thread> threads_;  // last: they use what stands above
};

}  // namespace pyckpt
