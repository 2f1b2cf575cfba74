// The standard library's mutex, lock and condition, as clang's thread-safety analysis can follow
// them.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "thread_annotations.h"

namespace pyckpt {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class Lock;
  std::mutex mutex_;
};

// Holds a mutex while it lives, but between `unlock` and `lock`.
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() RELEASE() {}

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// Something that threads wait for. What a predicate reads is guarded by the lock's mutex, which the
// predicate says: [this]() REQUIRES(mutex_) { ... }.
class Condition {
 public:
  void wait(Lock& lock) { changed_.wait(lock.lock_); }
  template <typename Predicate>
  void wait(Lock& lock, Predicate predicate) {
    changed_.wait(lock.lock_, std::move(predicate));
  }
  void notify_one() noexcept { changed_.notify_one(); }
  void notify_all() noexcept { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace pyckpt
