// The standard library's mutex, lock and condition, as clang's thread-safety analysis can follow
// them.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "thread_annotations.h"

// Where other threads may come first: tests have them do so (tests/native/perturb.h).
#ifdef PYCKPT_PERTURB
#include "perturb.h"
#define PYCKPT_MAY_YIELD() ::pyckpt::test::perturb()
#else
#define PYCKPT_MAY_YIELD() static_cast<void>(0)
#endif

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
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_, std::defer_lock) {
    PYCKPT_MAY_YIELD();
    lock_.lock();
    PYCKPT_MAY_YIELD();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() RELEASE() {
    if (lock_.owns_lock()) lock_.unlock();
    PYCKPT_MAY_YIELD();
  }

  void unlock() RELEASE() {
    lock_.unlock();
    PYCKPT_MAY_YIELD();
  }
  void lock() ACQUIRE() {
    PYCKPT_MAY_YIELD();
    lock_.lock();
  }

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
  void notify_one() noexcept {
    PYCKPT_MAY_YIELD();
    changed_.notify_one();
    PYCKPT_MAY_YIELD();
  }
  void notify_all() noexcept {
    PYCKPT_MAY_YIELD();
    changed_.notify_all();
    PYCKPT_MAY_YIELD();
  }

 private:
  std::condition_variable changed_;
};

}  // namespace pyckpt
