#include "engine.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "error.h"
#include "sizes.h"

namespace pyckpt {
namespace {

size_t processors() { return std::max(1u, std::thread::hardware_concurrency()); }

// How many threads copy what a caller waits for.
size_t staging_threads(const EngineOptions& options) {
  return std::min(processors(), options.io_threads);
}

// What the thread that prewarms adds to its nice value. Less favoured, it might lose its processor
// for long with the kernel's lock on the process's memory.
constexpr int kWarmingNice = 10;
constexpr int kNiceMax = 19;

// A thread begins with the nice value of the one that made it, and on Linux changes its own alone.
void be_nice() {
  const int own = ::getpriority(PRIO_PROCESS, 0);
  ::setpriority(PRIO_PROCESS, 0, std::min(kNiceMax, own + kWarmingNice));
}

}  // namespace

Engine::Engine(const EngineOptions& options) : options_(options), process_(::getpid()) {
  if (options.slot_bytes == 0 || options.slot_bytes % kPage != 0) {
    throw std::invalid_argument("slot_bytes must be a positive multiple of 4096");
  }
  if (options.slots == 0) throw std::invalid_argument("slots must be positive");
  if (options.io_threads == 0) throw std::invalid_argument("io_threads must be positive");
  if (options.slots > std::numeric_limits<size_t>::max() / options.slot_bytes) {
    throw std::invalid_argument("the ring is larger than memory can be");
  }
  ring_ = std::make_unique<SlotRing>(options.slots, options.slot_bytes);
  arena_ = std::make_shared<Arena>(options.arena_bytes);
  threads_ = std::make_unique<IoThreads>(options.io_threads);
  staging_threads_ = std::make_unique<IoThreads>(staging_threads(options), "pyckpt-stage");
}

Engine::~Engine() {
  if (forked()) {
    // The threads are not in this process, and their locks may have been held when it began: there
    // is nothing to join and nothing that is safe to free.
    threads_.release();
    staging_threads_.release();
    warming_thread_.release();
    ring_.release();
    new std::shared_ptr<Arena>(std::move(arena_));
    new std::vector<std::shared_ptr<Device>>(std::move(devices_));
    return;
  }
  close();
}

std::shared_ptr<WriteJob> Engine::start_write(const std::string& path,
                                              const WriteOptions& options) {
  check_process();
  // Opening a file may take a file system long, so it is not done under the lock.
  std::shared_ptr<WriteJob> job = WriteJob::start(ring_.get(), threads_.get(), path, options);
  const Lock lock(mutex_);
  check_open();
  remember(job);
  return job;
}

std::shared_ptr<StreamJob> Engine::start_stream() {
  check_process();
  const Lock lock(mutex_);
  check_open();
  auto job = std::make_shared<StreamJob>(ring_.get());
  remember(job);
  return job;
}

std::shared_ptr<ReadJob> Engine::make_read(Direct direct, bool checksum) {
  check_process();
  const Lock lock(mutex_);
  check_open();
  auto job = std::make_shared<ReadJob>(ring_.get(), threads_.get(), direct, checksum);
  remember(job);
  return job;
}

std::shared_ptr<PeerJob> Engine::make_peer_copy() {
  check_process();
  const Lock lock(mutex_);
  check_open();
  auto job = std::make_shared<PeerJob>(staging_threads_.get());
  remember(job);
  return job;
}

std::shared_ptr<StageJob> Engine::start_stage(const std::vector<StageSource>& sources,
                                              StageJob::Options options) {
  check_process();
  {
    const Lock lock(mutex_);
    check_open();
  }
  // Guarded memory is copied in the time until the next step, on few of the processors that the
  // program computes with; what the caller waits for, on as many as there are.
  options.lanes = std::max<size_t>(1, processors() / 4);
  options.volatile_lanes = staging_threads(options_);
  std::shared_ptr<StageJob> job =
      StageJob::start(arena_.get(), staging_threads_.get(), sources, std::move(options));
  const Lock lock(mutex_);
  remember(job);
  return job;
}

std::shared_ptr<Device> Engine::cuda_device([[maybe_unused]] int index) {
#ifdef PYCKPT_CUDA
  check_process();
  if (index < 0) throw std::invalid_argument("CUDA devices are numbered from 0 on");
  const Lock lock(mutex_);
  check_open();
  const auto at = static_cast<size_t>(index);
  if (devices_.size() <= at) devices_.resize(at + 1);
  if (!devices_[at]) {
    devices_[at] = make_cuda_device(index, [ring = ring_.get(), index] { ring->pin(index); });
  }
  return devices_[at];
#else
  throw CudaError("pyckpt was built without CUDA");
#endif
}

bool Engine::uses_devices() const {
  if (forked()) return false;
  const Lock lock(mutex_);
  return !devices_.empty();
}

void Engine::prewarm(size_t bytes, Arena::Kind kind, const std::vector<int>& devices) {
  check_process();
  for (const int index : devices) cuda_device(index)->prepare();
  arena_->reserve(bytes, kind, devices.empty() ? kNoDevice : devices.front(), /*populate=*/true);
}

void Engine::prewarm_later(size_t bytes, Arena::Kind kind, const std::vector<int>& devices) {
  check_process();
  arena_->reserve(bytes, kind, kNoDevice, /*populate=*/false);
  const Lock lock(mutex_);
  check_open();
  if (!warming_thread_) {
    warming_thread_ = std::make_unique<IoThreads>(1, "pyckpt-warm");
    warming_thread_->submit(be_nice);
  }
  warming_thread_->submit([this, kind, devices] { warm(kind, devices); });
  ++warmings_;  // once nothing can throw any more; `warm` counts it off under the same lock
}

void Engine::wait_prewarmed() {
  check_process();
  Lock lock(mutex_);
  warmed_.wait(lock, [this]() REQUIRES(mutex_) { return warmings_ == 0; });
}

void Engine::warm(Arena::Kind kind, const std::vector<int>& devices) noexcept {
  const auto goes_on = [this] { return !closed(); };
  try {
    for (const int index : devices) cuda_device(index)->prepare();
    const int pin_device = devices.empty() ? kNoDevice : devices.front();
    for (const Arena::Range& range : arena_->free_ranges(kind)) {
      if (!range.buffer->warm(range.offset, range.size, pin_device, goes_on)) break;
    }
  } catch (const std::exception&) {
    // The first save is without the help, and meets the error where somebody can be told.
  }
  const Lock lock(mutex_);
  --warmings_;
  warmed_.notify_all();
}

void Engine::close() {
  if (forked()) return;  // what there is to close is in the parent
  std::vector<std::weak_ptr<Job>> jobs;
  IoThreads* warming = nullptr;
  {
    const Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    jobs = std::exchange(jobs_, {});
    warming = warming_thread_.get();  // no other is made from here on
  }
  const auto error = std::make_exception_ptr(EngineClosed("the engine was closed while a job ran"));
  for (const std::weak_ptr<Job>& weak : jobs) {
    if (const std::shared_ptr<Job> job = weak.lock()) job->fail(error);
  }
  ring_->close();
  if (warming != nullptr) warming->stop();
  staging_threads_->stop();
  threads_->stop();
}

bool Engine::closed() const {
  const Lock lock(mutex_);
  return closed_;
}

bool Engine::forked() const { return ::getpid() != process_; }

void Engine::check_process() const {
  if (forked()) throw EngineClosed("the engine was made in another process, before a fork");
}

// What `close` fails. Jobs that are gone are forgotten on the way.
void Engine::remember(std::shared_ptr<Job> job) {
  const auto gone = [](const std::weak_ptr<Job>& other) { return other.expired(); };
  jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), gone), jobs_.end());
  jobs_.push_back(std::move(job));
}

void Engine::check_open() const {
  if (closed_) throw EngineClosed("the engine was closed");
}

}  // namespace pyckpt
