// Copies a state into an arena, while the program goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "device.h"
#include "device_copies.h"
#include "host_copies.h"
#include "io_threads.h"
#include "job.h"
#include "staged.h"

namespace pyckpt {

struct StageStatistics {
  uint64_t bytes_staged = 0;
  uint64_t bytes_streamed = 0;  // of sources that found no room
  double seconds = 0;           // from the start until all was copied, or to now
};

// All copies of one save: finds room for them in the arena, starts them, and knows what whoever
// waits for them is told. Threads make those of host memory (host_copies.h); devices make their own
// (device_copies.h), and have been given all of them when `start` returns. A thread that waits for
// host copies helps making them.
//
// Safe to call from any thread. The first error is thrown from every wait; what was not copied by
// then is passed over.
class StageJob : public Job, public std::enable_shared_from_this<StageJob> {
 public:
  struct Options {
    Arena::Kind kind = Arena::Kind::kPrivate;
    int pin_device = kNoDevice;  // if there is one, the memory is registered with CUDA
    size_t lanes = 1;            // how many threads copy guarded host memory at a time
    size_t volatile_lanes = 1;   // how many copy what is not guarded, which the caller waits for
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
  // Until everything was copied.
  void wait();

  // What `stream` of a device is given from now on waits, on the device, for the copies there.
  // Where that cannot be had the job fails before this throws: what the program does next may tear
  // them.
  void hold(const std::shared_ptr<Device>& device, Stream stream);

  // Throws the job's error, if there is one. A copy that is complete was whole, but whoever wrote
  // all of them asks this once more before it calls them a state.
  void check() { rethrow_if_failed(); }

  // Lets the sources go, once nothing reads them.
  void release_sources() noexcept;
  // Gives all memory back to the arena, whoever still points to it, once nothing writes to it.
  void release_regions() noexcept;

  StageStatistics statistics() const;

 private:
  friend class Staged;

  StageJob(const std::vector<StageSource>& sources, Options options);

  void place(Arena* arena, const std::vector<StageSource>& sources);
  void place_small(Arena* arena, const std::vector<size_t>& indices,
                   const std::vector<StageSource>& sources);
  void add(const StageSource& source, size_t index, std::shared_ptr<Region> region,
           std::byte* data);
  void do_units(size_t limit) noexcept;
  bool do_unit(size_t limit) noexcept;
  void wait_for(Staged* staged);
  void quiesce() noexcept;

  Options options_;
  std::vector<std::shared_ptr<Staged>> staged_;
  HostCopies host_copies_;
  DeviceCopies device_copies_;
  // Constant after the start.
  size_t volatile_units_ = 0;  // of the host's units, the first ones
  uint64_t bytes_staged_ = 0;
  uint64_t bytes_streamed_ = 0;

  size_t volatile_left_ GUARDED_BY(mutex_) = 0;
  size_t units_left_ GUARDED_BY(mutex_) = 0;
};

}  // namespace pyckpt
