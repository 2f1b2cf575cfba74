#include "slot_ring.h"

#include <utility>

#include "error.h"
#include "timeline.h"

namespace pyckpt {

Slot::Slot(Slot&& other) noexcept
    : ring_(std::exchange(other.ring_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}

Slot& Slot::operator=(Slot&& other) noexcept {
  if (this != &other) {
    release();
    ring_ = std::exchange(other.ring_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

void Slot::release() noexcept {
  if (ring_ != nullptr) std::exchange(ring_, nullptr)->give_back(std::exchange(data_, nullptr));
}

SlotRing::SlotRing(size_t slots, size_t slot_bytes)
    : slots_(slots), slot_bytes_(slot_bytes), buffer_(slots * slot_bytes) {
  for (size_t i = 0; i < slots; ++i) free_.push_back(buffer_.data() + i * slot_bytes);
  free_count_ = slots;
}

Slot SlotRing::acquire(bool* waited) {
  Lock lock(mutex_);
  *waited = free_count_ == 0 && !closed_;
  if (*waited) {
    const Span span("wait for a slot", slot_bytes_);
    freed_.wait(lock, [this]() REQUIRES(mutex_) { return closed_ || free_count_ != 0; });
  }
  if (closed_) throw EngineClosed("the engine was closed");
  return take_front();
}

Slot SlotRing::try_acquire() {
  const Lock lock(mutex_);
  if (closed_ || free_count_ == 0) return Slot();
  return take_front();
}

void SlotRing::close() {
  const Lock lock(mutex_);
  closed_ = true;
  freed_.notify_all();
}

Slot SlotRing::take_front() {
  std::byte* data = free_[head_];
  head_ = (head_ + 1) % slots_;
  --free_count_;
  return Slot(this, data);
}

void SlotRing::give_back(std::byte* data) noexcept {
  const Lock lock(mutex_);
  free_[(head_ + free_count_) % slots_] = data;
  ++free_count_;
  freed_.notify_one();
}

}  // namespace pyckpt
