#include "arena.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>
#include <vector>

#include "sizes.h"

namespace pyckpt {
namespace {

// A region is whole pages, so that it can be written from with direct I/O.
constexpr size_t kGrain = kPage;
constexpr size_t kSegmentGrain = kHugePage;

}  // namespace

void Region::give_back() noexcept { arena_->give_back(this); }

size_t Arena::region_size(size_t at_least) { return round_up(at_least, kGrain); }

std::shared_ptr<Region> Arena::allocate(size_t size, Kind kind, int pin_device) {
  size = region_size(std::max<size_t>(size, 1));
  std::shared_ptr<Region> region;
  {
    Lock lock(mutex_);
    region = take_free(size, kind);
    while (!region && growing_) {
      grown_.wait(lock);
      region = take_free(size, kind);
    }
    if (!region) {
      if (add_segment(size, kind, pin_device) == nullptr) return nullptr;
      region = take_free(size, kind);
    }
  }
  if (pin_device != kNoDevice) region->segment_->pin(pin_device);
  return region;
}

void Arena::reserve(size_t bytes, Kind kind, int pin_device, bool populate) {
  std::vector<std::shared_ptr<PinnedBuffer>> buffers;
  {
    Lock lock(mutex_);
    grown_.wait(lock, [this]() REQUIRES(mutex_) { return !growing_; });
    size_t free = 0;
    for (const Segment& segment : segments_) {
      if (segment.kind != kind) continue;
      for (const auto& [offset, size] : segment.free) free += size;
    }
    if (free < bytes) {
      const size_t room = (max_bytes_ - held_bytes_) / kSegmentGrain * kSegmentGrain;
      const size_t wanted = std::min(round_up(bytes - free, kSegmentGrain), room);
      if (wanted > 0) add_segment(wanted, kind, pin_device);
    }
    for (const Segment& segment : segments_) {
      if (segment.kind == kind) buffers.push_back(segment.buffer);
    }
  }
  if (pin_device != kNoDevice) {
    for (const auto& buffer : buffers) buffer->pin(pin_device);
  }
  if (!populate) return;
  for (const Range& range : free_ranges(kind)) range.buffer->populate(range.offset, range.size);
}

std::vector<Arena::Range> Arena::free_ranges(Kind kind) const {
  std::vector<Range> ranges;
  const Lock lock(mutex_);
  for (const Segment& segment : segments_) {
    if (segment.kind != kind) continue;
    for (const auto& [offset, size] : segment.free) {
      ranges.push_back({segment.buffer, offset, size});
    }
  }
  return ranges;
}

bool Arena::uses_device() const {
  const Lock lock(mutex_);
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const Segment& segment) { return segment.buffer->uses_device(); });
}

size_t Arena::held_bytes() const {
  const Lock lock(mutex_);
  return held_bytes_;
}

size_t Arena::used_bytes() const {
  const Lock lock(mutex_);
  return used_bytes_;
}

std::byte* Arena::take(Segment* segment, size_t size) {
  for (auto range = segment->free.begin(); range != segment->free.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < size) continue;
    segment->free.erase(range);
    if (length > size) segment->free.emplace(offset + size, length - size);
    return segment->buffer->data() + offset;
  }
  return nullptr;
}

void Arena::put_back(Segment* segment, size_t offset, size_t size) {
  auto& free = segment->free;
  const auto after = free.lower_bound(offset);
  if (after != free.end() && after->first == offset + size) {
    size += after->second;
    free.erase(after);
  }
  const auto at = free.lower_bound(offset);
  if (at != free.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free.emplace(offset, size);
}

std::shared_ptr<Region> Arena::take_free(size_t size, Kind kind) {
  for (Segment& segment : segments_) {
    if (segment.kind != kind) continue;
    std::byte* const data = take(&segment, size);
    if (data == nullptr) continue;
    used_bytes_ += size;
    return std::shared_ptr<Region>(new Region(shared_from_this(), segment.buffer, data, size));
  }
  return nullptr;
}

// Lets go of mutex_ for the time that it takes to make the memory. Then no other segment is
// made: whoever needs one looks first whether this one will do.
Arena::Segment* Arena::add_segment(size_t at_least, Kind kind, int pin_device) {
  const size_t size = round_up(at_least, kSegmentGrain);
  if (size > max_bytes_ - held_bytes_) return nullptr;
  growing_ = true;
  held_bytes_ += size;
  mutex_.unlock();
  std::list<Segment> made;
  std::exception_ptr error;
  try {
    auto buffer = std::make_shared<PinnedBuffer>(size, kind == Kind::kShared);
    if (pin_device != kNoDevice) buffer->pin(pin_device);
    made.push_back({kind, std::move(buffer), {{0, size}}});
  } catch (...) {
    error = std::current_exception();
  }
  mutex_.lock();
  growing_ = false;
  grown_.notify_all();
  if (error) {
    held_bytes_ -= size;
    std::rethrow_exception(error);
  }
  segments_.splice(segments_.end(), made);
  return &segments_.back();
}

void Arena::give_back(Region* region) noexcept {
  // In a child another thread of the parent may have held the mutex at the fork, for good.
  if (::getpid() != process_) return;
  const Lock lock(mutex_);
  if (std::exchange(region->given_back_, true)) return;
  for (Segment& segment : segments_) {
    if (segment.buffer != region->segment_) continue;
    put_back(&segment, region->offset(), region->size());
    used_bytes_ -= region->size();
    return;
  }
}

}  // namespace pyckpt
