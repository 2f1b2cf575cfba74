// Copies a state into an arena, while the program goes on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "device.h"
#include "io_threads.h"
#include "job.h"
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

// The copy of one source, on its way or there.
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

  // Waits until the copy is there. Throws what went wrong instead.
  void wait();
  // CRC-32 of the bytes; after `wait`.
  uint32_t crc() const { return crc_.load(std::memory_order_relaxed); }

 private:
  friend class StageJob;

  std::byte* const data_;
  const uint64_t size_;
  const std::weak_ptr<StageJob> job_;
  const std::shared_ptr<Region> region_;
  std::atomic<uint32_t> crc_{0};
  std::atomic<bool> there_{false};
  std::atomic<uint32_t> pieces_left_{0};
  std::shared_ptr<Ticket> ticket_;  // constant once the job has started; null for host memory
};

struct StageStatistics {
  uint64_t bytes_staged = 0;
  uint64_t bytes_streamed = 0;  // of sources that found no room
  double seconds = 0;           // from the start until all was there, or to now
};

// All copies of one save. Threads make those of host memory, checksumming on the way; devices make
// their own, and have been given all of them when `start` returns. A thread that waits for host
// copies helps making them.
//
// Safe to call from any thread. The first error is thrown from every wait; what was not copied by
// then is passed over.
class StageJob : public Job, public std::enable_shared_from_this<StageJob> {
 public:
  struct Options {
    Arena::Kind kind = Arena::Kind::kPrivate;
    int pin_device = kNoDevice;  // if there is one, the memory is registered with CUDA
    size_t lanes = 1;            // how many threads copy guarded host memory at a time
    size_t hurry = 1;            // and how many do while the caller waits
    // What keeps the sources allocated; let go of by `release_sources`.
    std::shared_ptr<const void> sources;
    // Of each device among the sources, the queue of the program that may write to them.
    std::vector<std::pair<std::shared_ptr<Device>, Stream>> programs;
  };

  // Begins. Devices must `follow` their programs already. The programs' queues are held until what
  // is not guarded was copied. The threads must be none that a disk can hold up. Throws IoError,
  // CudaError.
  static std::shared_ptr<StageJob> start(Arena* arena, IoThreads* threads,
                                         const std::vector<StageSource>& sources, Options options);

  // Waits for devices that still copy: their memory may not go before that.
  ~StageJob() override;

  // One a source; none for a source that found no room in the arena, or that has no memory.
  const std::vector<std::shared_ptr<Staged>>& staged() const { return staged_; }

  // Until host memory that is not guarded was copied.
  void wait_volatile();
  // Until host memory was copied, all of it.
  void wait_host();
  // Until everything is there.
  void wait();

  // What `stream` of a device is given from now on waits, on the device, for the copies there.
  // Where that cannot be had the job fails before this throws: what the program does next may tear
  // them.
  void hold(const std::shared_ptr<Device>& device, Stream stream);

  // Throws the job's error, if there is one. A copy that is there was whole, but whoever wrote all
  // of them asks this once more before it calls them a state.
  void check() { rethrow_if_failed(); }

  // Lets the sources go, once nothing reads them.
  void release_sources() noexcept;
  // Gives all memory back to the arena, whoever still points to it, once nothing writes to it.
  void release_regions() noexcept;

  StageStatistics statistics() const;

 private:
  friend class Staged;

  struct Copy {
    StageSource source;
    std::shared_ptr<Staged> staged;
  };
  // What a thread does at a time: a piece of one copy, or several small copies.
  struct Unit {
    size_t copy;
    size_t copies;
    uint64_t begin;  // of a piece
    uint64_t size;
  };

  StageJob(const std::vector<StageSource>& sources, Options options);

  void place(Arena* arena, const std::vector<StageSource>& sources);
  void place_small(Arena* arena, const std::vector<size_t>& indices,
                   const std::vector<StageSource>& sources);
  void add(const StageSource& source, size_t index, std::shared_ptr<Region> region,
           std::byte* data);
  void cut_units(bool guarded);
  void queue(const std::shared_ptr<Device>& device, bool guarded);
  void do_units(size_t limit) noexcept;
  bool do_unit(size_t limit) noexcept;
  void copy_unit(const Unit& unit);
  void copy_piece(const Copy& copy, uint64_t begin, uint64_t size);
  void wait_for(Staged* staged);
  void quiesce() noexcept;
  void wait_for_devices() noexcept;

  Options options_;
  std::vector<std::shared_ptr<Staged>> staged_;
  std::vector<Copy> copies_;  // of host memory, in the order of units
  std::vector<Copy> device_copies_;
  std::vector<Unit> units_;
  size_t volatile_units_ = 0;  // the first ones
  uint64_t bytes_staged_ = 0;
  uint64_t bytes_streamed_ = 0;
  // Of each device, the ticket behind all of its copies; as the above, constant after the start.
  std::vector<std::pair<std::shared_ptr<Device>, std::shared_ptr<Ticket>>> last_;

  std::atomic<size_t> next_unit_{0};

  // Guarded by mutex_.
  size_t volatile_left_ = 0;
  size_t units_left_ = 0;
};

}  // namespace pyckpt
