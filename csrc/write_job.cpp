#include "write_job.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "error.h"
#include "sizes.h"
#include "stage_job.h"

namespace pyckpt {
namespace {

Image::Options image_options(const SlotRing& ring, const File& file) {
  Image::Options options;
  options.slot_bytes = ring.slot_bytes();
  options.alignment = std::max<uint64_t>(kPage, file.offset_alignment());
  // A buffered write copies from anywhere; a direct one needs the memory aligned.
  options.in_place_memory = file.memory_alignment();
  return options;
}

}  // namespace

std::shared_ptr<WriteJob> WriteJob::start(SlotRing* ring, IoThreads* threads,
                                          const std::string& path, const WriteOptions& options) {
  std::shared_ptr<WriteJob> job(
      new WriteJob(ring, threads, options, File::create(path, options.direct)));
  job->file_.preallocate(options.preallocate);
  return job;
}

WriteJob::WriteJob(SlotRing* ring, IoThreads* threads, const WriteOptions& options, File file)
    : FillJob(ring, image_options(*ring, file)),
      threads_(threads),
      options_(options),
      file_(std::move(file)) {}

WriteJob::~WriteJob() { abandon(); }

// A task for each window, so that they take turns with those of other jobs. A task holds the job:
// one that comes to run after a failure finds it, and nothing to do.
void WriteJob::announce() {
  threads_->submit([job = shared_from_this()] { job->work(); });
}

void WriteJob::finish() {
  drain();
  try {
    // The last write was padded to the disk's blocks, and the preallocation was a guess.
    file_.truncate(image_.size());
    close_file();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  end_clock();
  ended_ = true;
}

void WriteJob::close_file() {
  Stopwatch::Lap lap(&syncing_, image_.size());
  if (options_.sync) file_.sync();
  file_.close();
  if (!options_.sync) return;
  const std::filesystem::path directory = std::filesystem::path(file_.path()).parent_path();
  sync_directory(directory.empty() ? "." : directory.string());
}

void WriteJob::abandon() noexcept {
  if (ended_ || forked()) return;
  stop();
  remove_file(file_.path());
  try {
    file_.close();  // whoever keeps the job must not keep the disk space
  } catch (const IoError&) {
    // The file is gone, and the job has failed for another reason.
  }
  end_clock();
}

WriteStatistics WriteJob::statistics() const {
  WriteStatistics statistics = FillJob::statistics();
  statistics.write_seconds = writing_.seconds();
  statistics.sync_seconds = syncing_.seconds();
  statistics.direct = file_.direct();
  statistics.fallback_reason = file_.fallback_reason();
  return statistics;
}

// Writes one window.
void WriteJob::work() noexcept {
  try {
    std::optional<Claim> claimed = claim();
    if (!claimed) return;
    bool written = false;
    try {
      written = write_window(*claimed);
    } catch (...) {
      fail(std::current_exception());
    }
    claimed->slot.release();
    const Lock lock(mutex_);
    --active_;
    if (written) bytes_written_.fetch_add(claimed->window.size, std::memory_order_relaxed);
    changed_.notify_all();
  } catch (...) {
    fail(std::current_exception());
  }
}

// A window is taken only with the slot that it needs in hand, and in their order. So of the windows
// taken, the first can always go on, and those that wait for its checksum come to their turn.
std::optional<WriteJob::Claim> WriteJob::claim() {
  Slot slot;
  Lock lock(mutex_);
  for (;;) {
    if (error_ || ready_.empty()) return std::nullopt;
    const bool in_place = ready_.front().in_place;
    if (in_place || slot) {
      Claim claimed{std::move(ready_.front()), in_place ? Slot() : std::move(slot)};
      ready_.pop_front();
      ready_bytes_ -= claimed.window.size;
      ++active_;
      changed_.notify_all();
      return claimed;
    }
    lock.unlock();
    bool waited = false;
    slot = ring_->acquire(&waited);
    if (waited) slot_waits_.fetch_add(1, std::memory_order_relaxed);
    lock.lock();
  }
}

// Returns false where the job failed meanwhile.
bool WriteJob::write_window(const Claim& claim) {
  const Window& window = claim.window;
  if (window.in_place) {
    const Piece& piece = window.pieces.front();
    if (piece.item->source.staged) piece.item->source.staged->wait();
    checksum_in_place(piece);
    {
      Stopwatch::Lap lap(&writing_, window.size);
      file_.write(piece.item->source.data + piece.begin, window.size, window.offset);
    }
    piece.item->pieces_held.fetch_sub(1, std::memory_order_release);
    return true;
  }
  if (!fill(window, claim.slot.data())) return false;
  uint64_t size = window.size;
  if (file_.direct()) {
    const uint64_t alignment = file_.offset_alignment();
    size = std::min<uint64_t>(round_up(size, alignment), ring_->slot_bytes());
    std::memset(claim.slot.data() + window.size, 0, size - window.size);
  }
  Stopwatch::Lap lap(&writing_, size);
  file_.write(claim.slot.data(), size, window.offset);
  return true;
}

}  // namespace pyckpt
