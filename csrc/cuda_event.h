// Points in streams, which can be waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "cuda_entry.h"
#include "cuda_status.h"
#include "mutex.h"

namespace pyckpt::cuda {

// Owns the events of one device that nobody uses, which are used again and again: making one takes
// a lock of the driver. Safe to call from any thread.
class EventPool {
 public:
  explicit EventPool(int index) : index_(index) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool() {
    if (free_.empty()) return;
    enter_or_ignore(index_, [events = std::move(free_)] {
      for (cudaEvent_t event : events) ignore(cudaEventDestroy(event));
    });
  }

  // Within an Entry.
  cudaEvent_t take() {
    {
      const Lock lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    return make();
  }

  void give_back(cudaEvent_t event) noexcept {
    const Lock lock(mutex_);
    free_.push_back(event);
  }

  // Makes sure that so many are free. As `take`, within an Entry.
  void fill(size_t count) {
    const Lock lock(mutex_);
    free_.reserve(count);
    while (free_.size() < count) free_.push_back(make());
  }

 private:
  static cudaEvent_t make() {
    cudaEvent_t event;
    // Whoever waits sleeps, and leaves the processor to the program.
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreateWithFlags");
    return event;
  }

  const int index_;
  Mutex mutex_;
  std::vector<cudaEvent_t> free_ GUARDED_BY(mutex_);
};

// Owns one event, and gives it back to its pool. Made within an Entry.
class PooledEvent {
 public:
  explicit PooledEvent(std::shared_ptr<EventPool> pool)
      : pool_(std::move(pool)), event_(pool_->take()) {}
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;
  ~PooledEvent() { pool_->give_back(event_); }

  cudaEvent_t get() const { return event_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  const cudaEvent_t event_;
};

}  // namespace pyckpt::cuda
