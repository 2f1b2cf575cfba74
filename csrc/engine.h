// Owns what is costly, and lends it to jobs.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "device.h"
#include "io_threads.h"
#include "job.h"
#include "mutex.h"
#include "peer_job.h"
#include "read_job.h"
#include "slot_ring.h"
#include "stage_job.h"
#include "stream_job.h"
#include "write_job.h"

namespace pyckpt {

struct EngineOptions {
  size_t slot_bytes = 2 << 20;  // a multiple of 4096
  size_t slots = 12;  // more than threads, so that these read on while slots are copied to devices
  size_t io_threads = 8;
  size_t arena_bytes = 0;  // of staged copies, at most
};

// A ring of slots, an arena, and the threads that move bytes through them. Jobs of one engine share
// them, and take turns; but the copies of a state, which the program waits for, have threads of
// their own, since the others may be in the kernel with a disk for as long as that takes. Must
// outlive its jobs. Safe to call from any thread, but useless in a forked child, which has none of
// the threads.
class Engine {
 public:
  explicit Engine(const EngineOptions& options);  // throws std::invalid_argument
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  std::shared_ptr<WriteJob> start_write(const std::string& path, const WriteOptions& options);

  std::shared_ptr<StreamJob> start_stream();

  std::shared_ptr<ReadJob> make_read(Direct direct, bool checksum);

  std::shared_ptr<PeerJob> make_peer_copy();

  // `options.lanes` and `options.volatile_lanes` are the engine's to choose.
  std::shared_ptr<StageJob> start_stage(const std::vector<StageSource>& sources,
                                        StageJob::Options options);

  Arena& arena() { return *arena_; }

  // The CUDA device of that index; the ring is registered with CUDA before its first copy. Whether
  // there is one shows at its first use. Throws std::invalid_argument; CudaError in a build without
  // CUDA.
  std::shared_ptr<Device> cuda_device(int index);

  bool uses_devices() const;

  // Makes now what the first staging of so many bytes of these CUDA devices would make: memory in
  // the arena, whose pages are there and registered, and all that the devices need. Throws IoError,
  // and what `cuda_device` throws.
  void prewarm(size_t bytes, Arena::Kind kind, const std::vector<int>& devices);

  // Begins the same on a thread of its own, which the processors serve after those of the program,
  // and which `close` does not wait for longer than a piece takes. Only addresses are taken before
  // this returns, so that a save that comes meanwhile uses the memory that is being made, and makes
  // what it needs sooner. An error is left to that save, which meets it, too. Throws IoError where
  // there are no addresses, std::system_error where there is no thread.
  void prewarm_later(size_t bytes, Arena::Kind kind, const std::vector<int>& devices);
  // Until nothing is being prewarmed.
  void wait_prewarmed();

  // Fails the jobs that run, with EngineClosed, and joins the threads. Idempotent.
  void close();
  bool closed() const;

  const EngineOptions& options() const { return options_; }

 private:
  bool forked() const;
  void check_process() const;
  void check_open() const REQUIRES(mutex_);
  void remember(std::shared_ptr<Job> job) REQUIRES(mutex_);
  void warm(Arena::Kind kind, const std::vector<int>& devices) noexcept;

  const EngineOptions options_;
  const pid_t process_;
  std::unique_ptr<SlotRing> ring_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<IoThreads> threads_;
  std::unique_ptr<IoThreads> staging_threads_;

  mutable Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<Job>> jobs_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Device>> devices_ GUARDED_BY(mutex_);
  std::unique_ptr<IoThreads> warming_thread_ GUARDED_BY(mutex_);  // made when there is something
  size_t warmings_ GUARDED_BY(mutex_) = 0;                        // for it to do: so much
  Condition warmed_;
};

}  // namespace pyckpt
