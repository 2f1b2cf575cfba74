#include "write_job.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "crc32.h"
#include "error.h"
#include "sizes.h"
#include "stage_job.h"
#include "timeline.h"
#include "transfer_batch.h"

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

void copy_bytes(std::byte* to, const std::string& from, const Piece& piece) {
  std::memcpy(to, from.data() + piece.begin, piece.size);
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
    : ring_(ring),
      threads_(threads),
      options_(options),
      image_(image_options(*ring, file)),
      file_(std::move(file)) {}

WriteJob::~WriteJob() { abandon(); }

bool WriteJob::add(std::shared_ptr<const Envelope> envelope, Source source) {
  check_running();
  image_.add(std::move(envelope), std::move(source), &full_);
  items_added_.fetch_add(1, std::memory_order_relaxed);
  bytes_added_.store(image_.size(), std::memory_order_relaxed);
  if (full_.empty()) return true;
  const Lock lock(mutex_);
  publish();
  return has_room();
}

void WriteJob::check_running() {
  rethrow_if_failed();
  if (ended_) throw std::logic_error("the job was finished already");
}

void WriteJob::wait_for_room() {
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return error_ || has_room(); });
}

bool WriteJob::has_room() const {
  return ready_bytes_ <= kQueuedRings * ring_->slots() * ring_->slot_bytes();
}

// Hands the windows that are full to the threads, a task each, so that they take turns with those
// of other jobs. A task holds the job: one that comes to run after a failure finds it, and nothing
// to do.
void WriteJob::publish() {
  for (Window& window : full_) {
    ready_bytes_ += window.size;
    ready_.push_back(std::move(window));
    threads_->submit([job = shared_from_this()] { job->work(); });
  }
  full_.clear();
}

void WriteJob::finish() {
  check_running();
  image_.finish(&full_);
  bytes_added_.store(image_.size(), std::memory_order_relaxed);
  {
    Lock lock(mutex_);
    publish();
    changed_.wait(lock,
                  [this]() REQUIRES(mutex_) { return active_ == 0 && (error_ || ready_.empty()); });
  }
  rethrow_if_failed();
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
  ended_ = true;
  fail(std::make_exception_ptr(std::runtime_error("the job was abandoned")));
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this]() REQUIRES(mutex_) { return active_ == 0; });
    ready_.clear();
  }
  remove_file(file_.path());
  try {
    file_.close();  // whoever keeps the job must not keep the disk space
  } catch (const IoError&) {
    // The file is gone, and the job has failed for another reason.
  }
  end_clock();
}

size_t WriteJob::consumed() {
  const std::deque<Item>& items = image_.items();
  while (consumed_ < items.size() &&
         items[consumed_].pieces_held.load(std::memory_order_acquire) == 0) {
    ++consumed_;
  }
  return consumed_;
}

WriteStatistics WriteJob::statistics() const {
  WriteStatistics statistics;
  statistics.items = items_added_.load();
  statistics.bytes_added = bytes_added_.load();
  statistics.bytes_written = bytes_written_.load();
  statistics.seconds = seconds();
  statistics.copy_seconds = copying_.seconds();
  statistics.checksum_seconds = checksumming_.seconds();
  statistics.write_seconds = writing_.seconds();
  statistics.sync_seconds = syncing_.seconds();
  statistics.slot_waits = slot_waits_.load();
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

bool WriteJob::fill(const Window& window, std::byte* slot) {
  fetch_from_devices(window, slot);
  uint64_t filled = 0;
  std::string suffix;
  for (const Piece& piece : window.pieces) {
    std::memset(slot + filled, 0, piece.at - filled);
    filled = piece.at + piece.size;
    switch (piece.part) {
      case Part::kGap:
        break;
      case Part::kPrefix:
        copy_bytes(slot + piece.at, piece.item->envelope->prefix, piece);
        break;
      case Part::kPayload:
        fill_payload(piece, slot + piece.at);
        break;
      case Part::kSuffix:
        if (!wait_for_checksum(*piece.item)) return false;
        suffix = piece.item->envelope->suffix;
        piece.item->envelope->stamp(piece.item->crc.load(std::memory_order_relaxed), suffix.data());
        copy_bytes(slot + piece.at, suffix, piece);
        break;
    }
  }
  std::memset(slot + filled, 0, window.size - filled);
  return true;
}

// All at once, so that small ones leave their device in one launch.
void WriteJob::fetch_from_devices(const Window& window, std::byte* slot) {
  TransferBatch batch;
  for (const Piece& piece : window.pieces) {
    const Source& source = piece.item->source;
    if (piece.part != Part::kPayload || !source.device) continue;
    batch.add(source.device.get(), {slot + piece.at, source.data + piece.begin, piece.size});
  }
  if (batch.empty()) return;
  Stopwatch::Lap lap(&copying_, window.size);
  batch.start_to_host();
  batch.wait();
}

void WriteJob::fill_payload(const Piece& piece, std::byte* to) {
  const Source& source = piece.item->source;
  if (source.staged) source.staged->wait();
  const bool checksummed = source.staged && source.staged->checksummed;
  uint32_t crc = 0;
  if (source.device) {
    Stopwatch::Lap lap(&checksumming_, piece.size);
    crc = crc32(0, to, piece.size);
  } else if (source.strided) {
    for (uint64_t done = 0; done < piece.size;) {
      const uint64_t step = std::min(kCacheBlock, piece.size - done);
      Stopwatch::Lap lap(&copying_, step);
      source.strided->gather(to + done, source.data, piece.begin + done, step);
      crc = crc32(crc, to + done, step);
      done += step;
    }
  } else {
    Stopwatch::Lap lap(&copying_, piece.size);
    const std::byte* const from = source.data + piece.begin;
    if (checksummed) {
      std::memcpy(to, from, piece.size);
    } else {
      // Past the cache, which the disk does not look into; what lies there is the program's.
      crc = copy_crc32_past_cache(0, to, from, piece.size);
    }
  }
  count_off(piece, crc);
  piece.item->pieces_held.fetch_sub(1, std::memory_order_release);
}

void WriteJob::checksum_in_place(const Piece& piece) {
  const Source& source = piece.item->source;
  uint32_t crc = 0;
  if (!source.staged || !source.staged->checksummed) {
    Stopwatch::Lap lap(&checksumming_, piece.size);
    crc = crc32(0, source.data + piece.begin, piece.size);
  }
  count_off(piece, crc);
}

void WriteJob::count_off(const Piece& piece, uint32_t crc) {
  Item& item = *piece.item;
  const Source& source = item.source;
  if (source.staged && source.staged->checksummed) {
    // Known as a whole since the copy was made; the first piece brings it.
    if (piece.begin == 0) item.crc.fetch_xor(source.staged->crc(), std::memory_order_relaxed);
  } else {
    const uint64_t after = source.size - piece.begin - piece.size;
    item.crc.fetch_xor(after == 0 ? crc : crc32_shift(crc, after), std::memory_order_relaxed);
  }
  if (item.pieces_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && item.spans_windows) {
    // The lock makes sure that a thread which saw the old count has begun to wait.
    const Lock lock(mutex_);
    changed_.notify_all();
  }
}

// Waits until all pieces of the payload were checksummed, by whichever threads. Returns false where
// the job failed instead.
bool WriteJob::wait_for_checksum(const Item& item) {
  const auto complete = [&] { return item.pieces_left.load(std::memory_order_acquire) == 0; };
  if (complete()) return true;
  const Span span("wait for a checksum", item.source.size);
  Lock lock(mutex_);
  changed_.wait(lock, [&]() REQUIRES(mutex_) { return error_ || complete(); });
  return complete();
}

}  // namespace pyckpt
