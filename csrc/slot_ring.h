// The memory that all transfers stream through.
#pragma once

#include <cstddef>
#include <vector>

#include "mutex.h"
#include "pinned_buffer.h"

namespace pyckpt {

class SlotRing;

// The right to use one slot's memory; gives it back when destroyed. Must not outlive its ring.
class [[nodiscard]] Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept;
  Slot& operator=(Slot&& other) noexcept;
  ~Slot() { release(); }

  explicit operator bool() const { return ring_ != nullptr; }
  std::byte* data() const { return data_; }
  void release() noexcept;

 private:
  friend class SlotRing;
  Slot(SlotRing* ring, std::byte* data) : ring_(ring), data_(data) {}

  SlotRing* ring_ = nullptr;
  std::byte* data_ = nullptr;
};

// N equal slots of one PinnedBuffer. They are handed out in the order they came back, so that under
// load they go round. All the memory that jobs of an engine use to move bytes is here: a full ring
// makes them wait, never allocate. Safe to call from any thread.
class SlotRing {
 public:
  SlotRing(size_t slots, size_t slot_bytes);

  // Waits for a free slot. `waited` is set to whether it had to. Throws EngineClosed after `close`.
  Slot acquire(bool* waited);
  // A free slot or none, at once.
  Slot try_acquire();
  // Wakes everyone who waits, for good.
  void close();

  // Registers all slots with CUDA, once, for all devices; see PinnedBuffer::pin.
  void pin(int device) { buffer_.pin(device); }

  size_t slots() const { return slots_; }
  size_t slot_bytes() const { return slot_bytes_; }

 private:
  friend class Slot;
  void give_back(std::byte* data) noexcept;
  Slot take_front() REQUIRES(mutex_);

  // Constant after construction.
  const size_t slots_;
  const size_t slot_bytes_;
  PinnedBuffer buffer_;

  Mutex mutex_;
  Condition freed_;
  // A circle of slots_ places, free_count_ of them taken from head_ on.
  std::vector<std::byte*> free_ GUARDED_BY(mutex_);
  size_t head_ GUARDED_BY(mutex_) = 0;
  size_t free_count_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace pyckpt
