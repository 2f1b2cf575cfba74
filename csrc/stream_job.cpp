#include "stream_job.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "error.h"
#include "sizes.h"

namespace pyckpt {
namespace {

Image::Options image_options(const SlotRing& ring) {
  Image::Options options;
  options.slot_bytes = ring.slot_bytes();
  options.alignment = kPage;
  // No window is in place: all are copied, and checksums are made on the way.
  options.in_place_memory = std::numeric_limits<uint64_t>::max();
  return options;
}

bool comes_from_device(const Window& window) {
  return std::any_of(window.pieces.begin(), window.pieces.end(), [](const Piece& piece) {
    return piece.part == Part::kPayload && piece.item->source.device;
  });
}

}  // namespace

StreamJob::StreamJob(SlotRing* ring) : FillJob(ring, image_options(*ring)) {}

StreamJob::~StreamJob() { abandon(); }

size_t StreamJob::next_size() {
  {
    Lock lock(mutex_);
    changed_.wait(lock,
                  [this]() REQUIRES(mutex_) { return error_ || !ready_.empty() || complete_; });
    if (!error_) return ready_.empty() ? 0 : ready_.front().size;
  }
  rethrow_if_failed();
  return 0;
}

void StreamJob::take(std::byte* to) {
  Window window;
  bool failed = false;
  {
    const Lock lock(mutex_);
    failed = error_ != nullptr;
    if (!failed) {
      if (ready_.empty()) throw std::logic_error("there is no window to take");
      window = std::move(ready_.front());
      ready_.pop_front();
      ready_bytes_ -= window.size;
      ++active_;  // from here to `--active_` nothing may leave: `stop` waits for it
      changed_.notify_all();
    }
  }
  if (!failed) {
    try {
      fill_window(window, to);
    } catch (...) {
      fail(std::current_exception());
    }
    const Lock lock(mutex_);
    --active_;
    // Looked at with the lock: a failure that comes later is none of this window's, and `finish`
    // may have found all of them taken.
    failed = error_ != nullptr;
    if (!failed) bytes_written_.fetch_add(window.size, std::memory_order_relaxed);
    changed_.notify_all();
  }
  if (failed) rethrow_if_failed();
}

// Devices copy into memory that is registered with them, and so into a slot.
void StreamJob::fill_window(const Window& window, std::byte* to) {
  if (!comes_from_device(window)) {
    fill(window, to);
    return;
  }
  bool waited = false;
  const Slot slot = ring_->acquire(&waited);
  if (waited) slot_waits_.fetch_add(1, std::memory_order_relaxed);
  if (fill(window, slot.data())) std::memcpy(to, slot.data(), window.size);
}

void StreamJob::finish() {
  drain();
  {
    const Lock lock(mutex_);
    complete_ = true;
    changed_.notify_all();
  }
  end_clock();
  ended_ = true;
}

void StreamJob::abandon() noexcept {
  if (ended_ || forked()) return;
  stop();
  end_clock();
}

}  // namespace pyckpt
