#include "arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pyckpt {
namespace {

constexpr size_t kGrain = 4096;  // so that every region can be written from with direct I/O
constexpr size_t kSegmentGrain = 2 << 20;  // a huge page

size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

}  // namespace

void Region::give_back() noexcept { arena_->give_back(this); }

size_t Arena::region_size(size_t at_least) { return round_up(at_least, kGrain); }

std::shared_ptr<Region> Arena::allocate(size_t size, Kind kind, bool pin) {
  size = region_size(std::max<size_t>(size, 1));
  std::lock_guard lock(mutex_);
  const auto region = [&](Segment& segment, std::byte* data) {
    used_bytes_ += size;
    return std::shared_ptr<Region>(new Region(shared_from_this(), segment.buffer, data, size));
  };
  for (Segment& segment : segments_) {
    if (segment.kind != kind) continue;
    std::byte* const data = take(&segment, size);
    if (data == nullptr) continue;
    try {
      if (pin) segment.buffer->pin();
    } catch (...) {
      put_back(&segment, static_cast<size_t>(data - segment.buffer->data()), size);
      throw;
    }
    return region(segment, data);
  }
  Segment* const grown = add_segment(size, kind, pin);
  if (grown == nullptr) return nullptr;
  return region(*grown, take(grown, size));
}

void Arena::reserve(size_t bytes, Kind kind, bool pin, bool touch) {
  std::lock_guard lock(mutex_);
  size_t free = 0;
  for (const Segment& segment : segments_) {
    if (segment.kind != kind) continue;
    for (const auto& [offset, size] : segment.free) free += size;
  }
  if (free < bytes) {
    const size_t room = (max_bytes_ - held_bytes_) / kSegmentGrain * kSegmentGrain;
    const size_t wanted = std::min(round_up(bytes - free, kSegmentGrain), room);
    if (wanted > 0) add_segment(wanted, kind, pin);
  }
  for (Segment& segment : segments_) {
    if (segment.kind != kind) continue;
    if (pin) segment.buffer->pin();
    if (!touch) continue;
    for (const auto& [offset, size] : segment.free) segment.buffer->touch(offset, size);
  }
}

size_t Arena::held_bytes() const {
  std::lock_guard lock(mutex_);
  return held_bytes_;
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
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

Arena::Segment* Arena::add_segment(size_t at_least, Kind kind, bool pin) {
  const size_t size = round_up(at_least, kSegmentGrain);
  if (size > max_bytes_ - held_bytes_) return nullptr;
  auto buffer = std::make_shared<PinnedBuffer>(size, kind == Kind::kShared);
  if (pin) buffer->pin();
  segments_.push_back({kind, std::move(buffer), {{0, size}}});
  held_bytes_ += size;
  return &segments_.back();
}

void Arena::give_back(Region* region) noexcept {
  std::lock_guard lock(mutex_);
  if (std::exchange(region->given_back_, true)) return;
  for (Segment& segment : segments_) {
    if (segment.buffer != region->segment_) continue;
    put_back(&segment, region->offset(), region->size());
    used_bytes_ -= region->size();
    return;
  }
}

}  // namespace pyckpt
