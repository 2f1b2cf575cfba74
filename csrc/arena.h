// Host memory for copies that outlive the call that made them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "mutex.h"
#include "pinned_buffer.h"

namespace pyckpt {

class Arena;

// A piece of an arena, and the right to use it. Keeps the arena's memory mapped while it lives; the
// right may be given back before that. Safe to call from any thread.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { give_back(); }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // What other processes need to map the memory: the segment's descriptor, -1 where it is private;
  // and the segment's size and where in it the region begins.
  int descriptor() const { return segment_->descriptor(); }
  size_t segment_size() const { return segment_->size(); }
  size_t offset() const { return static_cast<size_t>(data_ - segment_->data()); }

  // Makes the memory free for others, although this still points to it. Idempotent.
  void give_back() noexcept;

  // Whether all of the arena's memory goes when this does, which takes long; as far as one can know
  // while others may go at the same time.
  bool is_last_of_arena() const { return arena_.use_count() == 1; }
  // Whether CUDA is asked when the arena's memory goes.
  bool arena_uses_device() const;

 private:
  friend class Arena;
  Region(std::shared_ptr<Arena> arena, std::shared_ptr<PinnedBuffer> segment, std::byte* data,
         size_t size)
      : arena_(std::move(arena)), segment_(std::move(segment)), data_(data), size_(size) {}

  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<PinnedBuffer> segment_;
  std::byte* const data_;
  const size_t size_;
  bool given_back_ = false;  // guarded by the arena's mutex
};

// Page-aligned memory in segments that are allocated, and registered with CUDA, once, and used by
// one save after the other. Grows to its budget and never shrinks. Safe to call from any thread;
// only `allocate` and `reserve` take long, and do not hold the others up meanwhile. In a forked
// child its regions may go, and do nothing.
//
// First fit over free ranges that merge with their neighbours: states keep their shapes, so that a
// save mostly finds the very ranges that the one before it gave back.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(size_t max_bytes) : max_bytes_(max_bytes), process_(::getpid()) {}

  enum class Kind { kPrivate, kShared };  // shared: other processes can map it

  // The bytes that a region of at least so many takes.
  static size_t region_size(size_t at_least);

  // A region, or none where the budget is used up. With a device, registered with CUDA. Throws
  // IoError where the system has no memory, CudaError where it cannot be registered.
  std::shared_ptr<Region> allocate(size_t size, Kind kind, int pin_device = kNoDevice);

  // Makes sure that, as far as the budget goes, so many bytes are free, in as large pieces as can
  // be. With `populate` their pages are there, too.
  void reserve(size_t bytes, Kind kind, int pin_device, bool populate);

  // What is free of a kind.
  struct Range {
    std::shared_ptr<PinnedBuffer> buffer;
    size_t offset;
    size_t size;
  };
  std::vector<Range> free_ranges(Kind kind) const;

  // Whether any of the memory was to be registered for a device.
  bool uses_device() const;

  size_t max_bytes() const { return max_bytes_; }
  size_t held_bytes() const;  // of all segments, and of one that is being made
  size_t used_bytes() const;  // of all regions not given back

 private:
  friend class Region;
  struct Segment {
    Kind kind;
    std::shared_ptr<PinnedBuffer> buffer;
    std::map<size_t, size_t> free;  // size by offset; neighbours are merged
  };

  static std::byte* take(Segment* segment, size_t size);
  static void put_back(Segment* segment, size_t offset, size_t size);
  std::shared_ptr<Region> take_free(size_t size, Kind kind) REQUIRES(mutex_);
  Segment* add_segment(size_t at_least, Kind kind, int pin_device) REQUIRES(mutex_);
  void give_back(Region* region) noexcept;

  const size_t max_bytes_;
  const pid_t process_;

  mutable Mutex mutex_;
  Condition grown_;
  bool growing_ GUARDED_BY(mutex_) = false;  // some thread makes a segment
  std::list<Segment> segments_ GUARDED_BY(mutex_);
  size_t held_bytes_ GUARDED_BY(mutex_) = 0;
  size_t used_bytes_ GUARDED_BY(mutex_) = 0;
};

inline bool Region::arena_uses_device() const { return arena_->uses_device(); }

}  // namespace pyckpt
