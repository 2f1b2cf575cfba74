#include "stage_job.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "crc32.h"
#include "nvtx.h"
#include "sizes.h"

namespace pyckpt {
namespace {

// What a thread copies before it looks for more.
constexpr uint64_t kUnit = 1 << 20;
// How many bytes a device copies between two tickets: a writer can begin with the first while the
// others are on their way.
constexpr uint64_t kTicketBytes = 16 << 20;

// What small sources take that lie beside each other.
uint64_t bytes_together(const std::vector<size_t>& indices,
                        const std::vector<StageSource>& sources) {
  uint64_t total = 0;
  for (const size_t i : indices) total += round_up(sources[i].size, kSmallAlignment);
  return total;
}

}  // namespace

void Staged::wait() {
  if (there_.load(std::memory_order_acquire)) return;
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
    job->queue(device, /*guarded=*/false);
    for (const auto& [of, ticket] : job->last_) {
      if (of == device) device->hold(stream, *ticket);
    }
  }
  // Here, and not on some thread to come: whoever frees a source on the device, or asks for the
  // guard, finds its copy queued.
  for (const auto& [device, stream] : job->options_.programs) job->queue(device, /*guarded=*/true);
  const size_t lanes = std::min(job->options_.lanes, job->units_.size());
  const size_t hurry = std::min(job->options_.hurry, job->volatile_units_);
  for (size_t i = 0; i < std::max(lanes, hurry); ++i) {
    const size_t limit = i < lanes ? job->units_.size() : job->volatile_units_;
    if (!threads->submit([job, limit] { job->do_units(limit); })) job->do_units(limit);
  }
  if (job->copies_.empty() && job->device_copies_.empty()) job->end_clock();
  return job;
}

StageJob::StageJob(const std::vector<StageSource>& sources, Options options)
    : options_(std::move(options)), staged_(sources.size()) {}

StageJob::~StageJob() {
  if (forked()) return;
  wait_for_devices();  // but for no thread: each has the job while it copies
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
    cut_units(group.guarded);
  }
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
    staged->there_.store(true);
    return;
  }
  (source.device ? device_copies_ : copies_).push_back({source, std::move(staged)});
}

void StageJob::cut_units(bool guarded) {
  const auto first = static_cast<size_t>(
      std::find_if(copies_.begin(), copies_.end(),
                   [&](const Copy& copy) { return copy.source.guarded == guarded; }) -
      copies_.begin());
  for (size_t i = first; i < copies_.size();) {
    const uint64_t size = copies_[i].source.size;
    if (size >= kSmallSource) {
      // Pieces end where blocks do, so that all but the last are whole blocks.
      for (uint64_t begin = 0; begin < size; begin += kUnit) {
        units_.push_back({i, 1, begin, std::min(kUnit, size - begin)});
      }
      copies_[i].staged->pieces_left_ = static_cast<uint32_t>((size + kUnit - 1) / kUnit);
      ++i;
      continue;
    }
    Unit unit{i, 0, 0, 0};
    while (i < copies_.size() && copies_[i].source.size < kSmallSource && unit.size < kUnit) {
      unit.size += copies_[i].source.size;
      ++unit.copies;
      copies_[i].staged->pieces_left_ = 1;
      ++i;
    }
    units_.push_back(unit);
  }
  if (!guarded) volatile_left_ = volatile_units_ = units_.size();
  units_left_ = units_.size();
}

void StageJob::queue(const std::shared_ptr<Device>& device, bool guarded) {
  std::vector<Transfer> transfers;
  std::vector<Staged*> those;
  uint64_t bytes = 0;
  const auto flush = [&] {
    if (transfers.empty()) return;
    const std::shared_ptr<Ticket> ticket = device->copy_to_host(transfers);
    const auto same = [&](const auto& last) { return last.first == device; };
    const auto last = std::find_if(last_.begin(), last_.end(), same);
    if (last == last_.end()) {
      last_.emplace_back(device, ticket);
    } else {
      last->second = ticket;
    }
    for (Staged* staged : those) staged->ticket_ = ticket;
    transfers.clear();
    those.clear();
    bytes = 0;
  };
  for (const Copy& copy : device_copies_) {
    if (copy.source.device != device || copy.source.guarded != guarded) continue;
    transfers.push_back({copy.staged->data(), copy.source.data, copy.source.size});
    those.push_back(copy.staged.get());
    bytes += copy.source.size;
    if (bytes >= kTicketBytes) flush();
  }
  flush();
}

void StageJob::do_units(size_t limit) noexcept {
  while (do_unit(limit)) {
  }
}

// Copies the next unit, or passes it over where the job has failed; unless those before `limit` are
// taken. However it ends, the unit is counted off: whoever frees memory waits for the count.
bool StageJob::do_unit(size_t limit) noexcept {
  size_t index = next_unit_.load(std::memory_order_relaxed);
  do {
    if (index >= limit) return false;
  } while (!next_unit_.compare_exchange_weak(index, index + 1, std::memory_order_relaxed));
  if (!has_failed()) {
    try {
      copy_unit(units_[index]);
    } catch (...) {
      fail(std::current_exception());
    }
  }
  std::lock_guard lock(mutex_);
  if (index < volatile_units_) --volatile_left_;
  if (--units_left_ == 0) end_clock();
  changed_.notify_all();
  return true;
}

void StageJob::copy_unit(const Unit& unit) {
  const NvtxRange range("stage", unit.size);
  if (unit.copies == 1) {
    copy_piece(copies_[unit.copy], unit.begin, unit.size);
    return;
  }
  for (size_t i = unit.copy; i < unit.copy + unit.copies; ++i) {
    copy_piece(copies_[i], 0, copies_[i].source.size);
  }
}

void StageJob::copy_piece(const Copy& copy, uint64_t begin, uint64_t size) {
  const StageSource& source = copy.source;
  Staged& staged = *copy.staged;
  uint32_t crc = 0;
  if (!source.strided) {
    crc = copy_crc32_past_cache(0, staged.data() + begin, source.data + begin, size);
  } else {
    for (uint64_t done = 0; done < size;) {
      const uint64_t step = std::min(kCacheBlock, size - done);
      std::byte* const to = staged.data() + begin + done;
      source.strided->gather(to, source.data, begin + done, step);
      crc = crc32(crc, to, step);
      done += step;
    }
  }
  const uint64_t after = source.size - begin - size;
  staged.crc_.fetch_xor(after == 0 ? crc : crc32_shift(crc, after), std::memory_order_relaxed);
  // A guard that failed meanwhile did not keep the program from the source.
  if (staged.pieces_left_.fetch_sub(1, std::memory_order_acq_rel) == 1 && !has_failed()) {
    staged.there_.store(true, std::memory_order_release);
  }
}

// A thread of the engine must not help here: that would take processors from the program.
void StageJob::wait_for(Staged* staged) {
  if (!staged->ticket_) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || staged->there_.load(); });
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
  staged->there_.store(true, std::memory_order_release);
}

void StageJob::wait_volatile() {
  do_units(volatile_units_);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || volatile_left_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void StageJob::wait_host() {
  do_units(units_.size());
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || units_left_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void StageJob::wait() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return error_ || units_left_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }
  for (const Copy& copy : device_copies_) copy.staged->wait();
  end_clock();
}

void StageJob::hold(const std::shared_ptr<Device>& device, Stream stream) {
  rethrow_if_failed();
  try {
    for (const auto& [of, ticket] : last_) {
      if (of == device) device->hold(stream, *ticket);
    }
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

// Until neither threads nor devices read the sources or write to the regions, whether or not the
// job has failed.
void StageJob::quiesce() noexcept {
  if (has_failed()) do_units(units_.size());  // which are passed over
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return units_left_ == 0; });
  }
  wait_for_devices();
}

void StageJob::wait_for_devices() noexcept {
  for (const auto& [device, ticket] : last_) {
    try {
      ticket->wait();
    } catch (...) {
      // A device that failed copies no more; whoever waits for its copies is told by their tickets.
    }
  }
}

void StageJob::release_sources() noexcept {
  quiesce();
  std::shared_ptr<const void> sources;
  std::lock_guard lock(mutex_);
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
