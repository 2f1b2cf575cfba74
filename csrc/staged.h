// What staging reads, and what it makes of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "arena.h"
#include "device.h"
#include "strided.h"

namespace pyckpt {

class StageJob;

// Memory to be copied. It must stay allocated until the job lets go of its sources, and stay as it
// is until the part of the job that it belongs to was waited for.
struct StageSource {
  const std::byte* data = nullptr;
  uint64_t size = 0;
  std::shared_ptr<const Strided> strided;  // null: the bytes lie one after another
  std::shared_ptr<Device> device;          // null: host memory
  // Nothing writes to it before the program's next optimizer step, which is guarded. What is not
  // guarded is copied first.
  bool guarded = false;
};

// The copy of one source, on its way or complete.
class Staged {
 public:
  Staged(std::weak_ptr<StageJob> job, std::shared_ptr<Region> region, std::byte* data,
         uint64_t size, bool checksummed)
      : checksummed(checksummed),
        data_(data),
        size_(size),
        job_(std::move(job)),
        region_(std::move(region)) {}

  // Whether `crc` will be known: not of what a device copied, which no CPU has touched.
  const bool checksummed;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  const std::shared_ptr<Region>& region() const { return region_; }  // null where size is 0

  // Waits until the copy is complete. Throws what went wrong instead.
  void wait();
  // CRC-32 of the bytes; after `wait`.
  uint32_t crc() const { return crc_.load(std::memory_order_relaxed); }

 private:
  friend class StageJob;
  friend class HostCopies;
  friend class DeviceCopies;

  std::byte* const data_;
  const uint64_t size_;
  const std::weak_ptr<StageJob> job_;
  const std::shared_ptr<Region> region_;
  std::atomic<uint32_t> crc_{0};
  std::atomic<bool> complete_{false};
  std::atomic<uint32_t> pieces_left_{0};
  std::shared_ptr<Ticket> ticket_;  // constant once the job has started; null for host memory
};

// A source, and where it is copied to.
struct StageCopy {
  StageSource source;
  std::shared_ptr<Staged> staged;
};

}  // namespace pyckpt
