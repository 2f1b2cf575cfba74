#include "stage_job.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "sizes.h"
#include "timeline.h"

namespace pyckpt {
namespace {

// What small sources take that lie beside each other.
uint64_t bytes_together(const std::vector<size_t>& indices,
                        const std::vector<StageSource>& sources) {
  uint64_t total = 0;
  for (const size_t i : indices) total += round_up(sources[i].size, kSmallAlignment);
  return total;
}

}  // namespace

void Staged::wait() {
  if (complete_.load(std::memory_order_acquire)) return;
  const std::shared_ptr<StageJob> job = job_.lock();
  if (!job) throw std::runtime_error("the copy was given up");
  job->wait_for(this);
}

std::shared_ptr<StageJob> StageJob::start(Arena* arena, IoThreads* threads,
                                          const std::vector<StageSource>& sources,
                                          Options options) {
  std::shared_ptr<StageJob> job(new StageJob(sources, std::move(options)));
  job->place(arena, sources);
  for (const auto& [device, stream] : job->options_.programs) {
    job->device_copies_.queue(device, /*guarded=*/false);
    job->device_copies_.hold(device, stream);
  }
  // Here, and not on some thread to come: whoever frees a source on the device, or asks for the
  // guard, finds its copy queued.
  for (const auto& [device, stream] : job->options_.programs) {
    job->device_copies_.queue(device, /*guarded=*/true);
  }
  const size_t units = job->host_copies_.units();
  const size_t lanes = std::min(job->options_.lanes, units);
  const size_t volatile_lanes = std::min(job->options_.volatile_lanes, job->volatile_units_);
  for (size_t i = 0; i < std::max(lanes, volatile_lanes); ++i) {
    const size_t limit = i < lanes ? units : job->volatile_units_;
    if (!threads->submit([job, limit] { job->do_units(limit); })) job->do_units(limit);
  }
  if (job->host_copies_.empty() && job->device_copies_.empty()) job->end_clock();
  return job;
}

StageJob::StageJob(const std::vector<StageSource>& sources, Options options)
    : options_(std::move(options)), staged_(sources.size()) {}

StageJob::~StageJob() {
  if (forked()) return;
  device_copies_.wait_for_devices();  // but for no thread: each has the job while it copies
}

// Finds room, first for what is not guarded: what finds none costs the caller a wait.
void StageJob::place(Arena* arena, const std::vector<StageSource>& sources) {
  struct Group {
    bool guarded;
    std::vector<size_t> small, large;
  };
  Group groups[] = {{false, {}, {}}, {true, {}, {}}};
  // Tensors that are the same memory are copied once.
  std::unordered_map<const std::byte*, size_t> seen;
  std::vector<std::pair<size_t, size_t>> twins;
  uint64_t total = 0;
  for (Group& group : groups) {
    for (size_t i = 0; i < sources.size(); ++i) {
      const StageSource& source = sources[i];
      if (source.guarded != group.guarded || source.data == nullptr) continue;
      if (!source.strided) {
        const auto [twin, is_new] = seen.emplace(source.data, i);
        if (!is_new && sources[twin->second].size == source.size &&
            sources[twin->second].device == source.device) {
          twins.emplace_back(i, twin->second);
          continue;
        }
      }
      (source.size < kSmallSource ? group.small : group.large).push_back(i);
    }
    total += Arena::region_size(bytes_together(group.small, sources));
    for (const size_t i : group.large) total += Arena::region_size(sources[i].size);
  }
  arena->reserve(total, options_.kind, options_.pin_device, /*populate=*/false);

  for (const Group& group : groups) {
    place_small(arena, group.small, sources);
    for (const size_t i : group.large) {
      std::shared_ptr<Region> region =
          arena->allocate(sources[i].size, options_.kind, options_.pin_device);
      if (region) {
        std::byte* const data = region->data();
        add(sources[i], i, std::move(region), data);
      } else {
        bytes_streamed_ += sources[i].size;
      }
    }
    host_copies_.cut_units();
    if (!group.guarded) volatile_units_ = host_copies_.units();
  }
  const Lock lock(mutex_);
  volatile_left_ = volatile_units_;
  units_left_ = host_copies_.units();
  for (const auto& [i, twin] : twins) staged_[i] = staged_[twin];
}

// All of them in one region, as dense as they may lie: one launch can fill it.
void StageJob::place_small(Arena* arena, const std::vector<size_t>& indices,
                           const std::vector<StageSource>& sources) {
  const uint64_t total = bytes_together(indices, sources);
  std::shared_ptr<Region> region;
  if (total > 0) {
    region = arena->allocate(total, options_.kind, options_.pin_device);
    if (!region) {
      for (const size_t i : indices) bytes_streamed_ += sources[i].size;
      return;
    }
  }
  std::byte* at = region ? region->data() : nullptr;
  for (const size_t i : indices) {
    add(sources[i], i, region, at);
    at += round_up(sources[i].size, kSmallAlignment);
  }
}

void StageJob::add(const StageSource& source, size_t index, std::shared_ptr<Region> region,
                   std::byte* data) {
  auto staged = std::make_shared<Staged>(weak_from_this(), std::move(region), data, source.size,
                                         /*checksummed=*/!source.device);
  staged_[index] = staged;
  bytes_staged_ += source.size;
  if (source.size == 0) {
    staged->complete_.store(true);
  } else if (source.device) {
    device_copies_.add(source, std::move(staged));
  } else {
    host_copies_.add(source, std::move(staged));
  }
}

void StageJob::do_units(size_t limit) noexcept {
  while (do_unit(limit)) {
  }
}

// Copies the next unit, or passes it over where the job has failed; unless those before `limit` are
// taken. However it ends, the unit is counted off: whoever frees memory waits for the count.
bool StageJob::do_unit(size_t limit) noexcept {
  const std::optional<size_t> unit = host_copies_.take(limit);
  if (!unit) return false;
  if (!has_failed()) {
    try {
      host_copies_.copy(*unit, *this);
    } catch (...) {
      fail(std::current_exception());
    }
  }
  const Lock lock(mutex_);
  if (*unit < volatile_units_) --volatile_left_;
  if (--units_left_ == 0) end_clock();
  changed_.notify_all();
  return true;
}

// A thread of the engine must not help here: that would take processors from the program.
void StageJob::wait_for(Staged* staged) {
  const Span span("wait for a copy", staged->size());
  if (!staged->ticket_) {
    Lock lock(mutex_);
    changed_.wait(lock, [&]() REQUIRES(mutex_) { return error_ || staged->complete_.load(); });
    if (error_) std::rethrow_exception(error_);
    return;
  }
  rethrow_if_failed();
  try {
    staged->ticket_->wait();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  rethrow_if_failed();  // a guard that failed meanwhile did not keep the program from the source
  staged->complete_.store(true, std::memory_order_release);
}

void StageJob::wait_volatile() {
  do_units(volatile_units_);
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || volatile_left_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void StageJob::wait_host() {
  do_units(host_copies_.units());
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || units_left_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void StageJob::wait() {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || units_left_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }
  device_copies_.wait();
  end_clock();
}

void StageJob::hold(const std::shared_ptr<Device>& device, Stream stream) {
  rethrow_if_failed();
  try {
    device_copies_.hold(device, stream);
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

// Until neither threads nor devices read the sources or write to the regions, whether or not the
// job has failed.
void StageJob::quiesce() noexcept {
  if (has_failed()) do_units(host_copies_.units());  // which are passed over
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this]() REQUIRES(mutex_) { return units_left_ == 0; });
  }
  device_copies_.wait_for_devices();
}

void StageJob::release_sources() noexcept {
  quiesce();
  std::shared_ptr<const void> sources;
  const Lock lock(mutex_);
  sources.swap(options_.sources);  // and let go of after the lock
}

void StageJob::release_regions() noexcept {
  quiesce();
  for (const std::shared_ptr<Staged>& staged : staged_) {
    if (staged && staged->region()) staged->region()->give_back();
  }
}

StageStatistics StageJob::statistics() const { return {bytes_staged_, bytes_streamed_, seconds()}; }

}  // namespace pyckpt
