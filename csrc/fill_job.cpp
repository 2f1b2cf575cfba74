#include "fill_job.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "crc32.h"
#include "sizes.h"
#include "stage_job.h"
#include "timeline.h"
#include "transfer_batch.h"

namespace pyckpt {
namespace {

void copy_bytes(std::byte* to, const std::string& from, const Piece& piece) {
  std::memcpy(to, from.data() + piece.begin, piece.size);
}

}  // namespace

FillJob::FillJob(SlotRing* ring, const Image::Options& options) : ring_(ring), image_(options) {}

bool FillJob::add(std::shared_ptr<const Envelope> envelope, Source source) {
  check_running();
  try {
    image_.add(std::move(envelope), std::move(source), &full_);
    items_added_.fetch_add(1, std::memory_order_relaxed);
    bytes_added_.store(image_.size(), std::memory_order_relaxed);
    if (full_.empty()) return true;
    const Lock lock(mutex_);
    publish();
    return has_room();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

void FillJob::check_running() {
  rethrow_if_failed();
  if (ended_) throw std::logic_error("the job was finished already");
}

void FillJob::wait_for_room() {
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || has_room(); });
}

bool FillJob::has_room() const {
  return ready_bytes_ <= kQueuedRings * ring_->slots() * ring_->slot_bytes();
}

// Hands out the windows that are full. If it throws, some are handed out, and one may be ready that
// nobody was told of: the caller fails the job, since `drain` would wait for that one for ever.
void FillJob::publish() {
  for (Window& window : full_) {
    ready_bytes_ += window.size;
    ready_.push_back(std::move(window));
    announce();
  }
  full_.clear();
}

void FillJob::drain() {
  check_running();
  try {
    image_.finish(&full_);
    bytes_added_.store(image_.size(), std::memory_order_relaxed);
    const Lock lock(mutex_);
    publish();
  } catch (...) {
    fail(std::current_exception());
  }
  {
    Lock lock(mutex_);
    changed_.wait(lock,
                  [this]() REQUIRES(mutex_) { return active_ == 0 && (error_ || ready_.empty()); });
  }
  rethrow_if_failed();
}

void FillJob::stop() noexcept {
  ended_ = true;
  fail(std::make_exception_ptr(std::runtime_error("the job was abandoned")));
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return active_ == 0; });
  ready_.clear();
}

size_t FillJob::consumed() {
  const std::deque<Item>& items = image_.items();
  while (consumed_ < items.size() &&
         items[consumed_].pieces_held.load(std::memory_order_acquire) == 0) {
    ++consumed_;
  }
  return consumed_;
}

WriteStatistics FillJob::statistics() const {
  WriteStatistics statistics;
  statistics.items = items_added_.load();
  statistics.bytes_added = bytes_added_.load();
  statistics.bytes_written = bytes_written_.load();
  statistics.seconds = seconds();
  statistics.copy_seconds = copying_.seconds();
  statistics.checksum_seconds = checksumming_.seconds();
  statistics.slot_waits = slot_waits_.load();
  return statistics;
}

bool FillJob::fill(const Window& window, std::byte* slot) {
  fetch_from_devices(window, slot);
  uint64_t filled = 0;
  std::string suffix;
  for (const Piece& piece : window.pieces) {
    std::memset(slot + filled, 0, piece.at - filled);
    filled = piece.at + piece.size;
    switch (piece.part) {
      case Part::kGap:
        break;
      case Part::kPrefix:
        copy_bytes(slot + piece.at, piece.item->envelope->prefix, piece);
        break;
      case Part::kPayload:
        fill_payload(piece, slot + piece.at);
        break;
      case Part::kSuffix:
        if (!wait_for_checksum(*piece.item)) return false;
        suffix = piece.item->envelope->suffix;
        piece.item->envelope->stamp(piece.item->crc.load(std::memory_order_relaxed), suffix.data());
        copy_bytes(slot + piece.at, suffix, piece);
        break;
    }
  }
  std::memset(slot + filled, 0, window.size - filled);
  return true;
}

// All at once, so that small ones leave their device in one launch.
void FillJob::fetch_from_devices(const Window& window, std::byte* slot) {
  TransferBatch batch;
  for (const Piece& piece : window.pieces) {
    const Source& source = piece.item->source;
    if (piece.part != Part::kPayload || !source.device) continue;
    batch.add(source.device.get(), {slot + piece.at, source.data + piece.begin, piece.size});
  }
  if (batch.empty()) return;
  Stopwatch::Lap lap(&copying_, window.size);
  batch.start_to_host();
  batch.wait();
}

void FillJob::fill_payload(const Piece& piece, std::byte* to) {
  const Source& source = piece.item->source;
  if (source.staged) source.staged->wait();
  const bool checksummed = source.staged && source.staged->checksummed;
  uint32_t crc = 0;
  if (source.device) {
    Stopwatch::Lap lap(&checksumming_, piece.size);
    crc = crc32(0, to, piece.size);
  } else if (source.strided) {
    for (uint64_t done = 0; done < piece.size;) {
      const uint64_t step = std::min(kCacheBlock, piece.size - done);
      Stopwatch::Lap lap(&copying_, step);
      source.strided->gather(to + done, source.data, piece.begin + done, step);
      crc = crc32(crc, to + done, step);
      done += step;
    }
  } else {
    Stopwatch::Lap lap(&copying_, piece.size);
    const std::byte* const from = source.data + piece.begin;
    if (checksummed) {
      std::memcpy(to, from, piece.size);
    } else {
      // Past the cache, which the disk does not look into; what lies there is the program's.
      crc = copy_crc32_past_cache(0, to, from, piece.size);
    }
  }
  count_off(piece, crc);
  piece.item->pieces_held.fetch_sub(1, std::memory_order_release);
}

void FillJob::checksum_in_place(const Piece& piece) {
  const Source& source = piece.item->source;
  uint32_t crc = 0;
  if (!source.staged || !source.staged->checksummed) {
    Stopwatch::Lap lap(&checksumming_, piece.size);
    crc = crc32(0, source.data + piece.begin, piece.size);
  }
  count_off(piece, crc);
}

void FillJob::count_off(const Piece& piece, uint32_t crc) {
  Item& item = *piece.item;
  const Source& source = item.source;
  if (source.staged && source.staged->checksummed) {
    // Known as a whole since the copy was made; the first piece brings it.
    if (piece.begin == 0) item.crc.fetch_xor(source.staged->crc(), std::memory_order_relaxed);
  } else {
    const uint64_t after = source.size - piece.begin - piece.size;
    item.crc.fetch_xor(after == 0 ? crc : crc32_shift(crc, after), std::memory_order_relaxed);
  }
  if (item.pieces_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && item.spans_windows) {
    // The lock makes sure that a thread which saw the old count has begun to wait.
    const Lock lock(mutex_);
    changed_.notify_all();
  }
}

// Waits until all pieces of the payload were checksummed, by whichever threads. Returns false where
// the job failed instead.
bool FillJob::wait_for_checksum(const Item& item) {
  const auto complete = [&] { return item.pieces_left.load(std::memory_order_acquire) == 0; };
  if (complete()) return true;
  const Span span("wait for a checksum", item.source.size);
  Lock lock(mutex_);
  changed_.wait(lock, [&]() REQUIRES(mutex_) { return error_ || complete(); });
  return complete();
}

}  // namespace pyckpt
