#include "io_threads.h"

#include <pthread.h>

#include <string>
#include <utility>

#include "nvtx.h"
#include "signals.h"

namespace pyckpt {

IoThreads::IoThreads(size_t count, const char* group) : count_(count) {
  const SignalsBlocked blocked;
  try {
    for (size_t i = 0; i < count; ++i) {
      const std::string name = std::string(group) + "-" + std::to_string(i);
      threads_.emplace_back([this, name] {
        name_nvtx_thread(name.c_str());
        run();
      });
      pthread_setname_np(threads_.back().native_handle(), name.c_str());
    }
  } catch (...) {
    stop();
    throw;
  }
}

bool IoThreads::submit(std::function<void()> task) {
  const Lock lock(mutex_);
  if (stopping_) return false;
  tasks_.push_back(std::move(task));
  submitted_.notify_one();
  return true;
}

void IoThreads::stop() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    submitted_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void IoThreads::run() {
  Lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [this]() REQUIRES(mutex_) { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds is let go of outside the lock
    lock.lock();
  }
}

}  // namespace pyckpt
