#include "read_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "crc32.h"
#include "error.h"
#include "stream_copy.h"

namespace pyckpt {

ReadJob::ReadJob(SlotRing* ring, IoThreads* threads, Direct direct, bool checksum)
    : ring_(ring), threads_(threads), direct_(direct), checksum_(checksum) {}

size_t ReadJob::add_file(const std::string& path) {
  File file = File::open(path, direct_);
  const Lock lock(mutex_);
  files_.push_back(std::move(file));
  return files_.size() - 1;
}

size_t ReadJob::add(size_t file, uint64_t offset, uint64_t size, Destination destination) {
  const Strided* strided = destination.strided.get();
  bytes_needed_ += strided == nullptr ? size : strided->memory_bytes();
  const Lock lock(mutex_);
  Range& range = ranges_.emplace_back();
  range.file = file;
  range.offset = offset;
  range.size = size;
  range.destination = std::move(destination);
  return ranges_.size() - 1;
}

std::vector<uint32_t> ReadJob::run() {
  try {
    start();
  } catch (...) {
    fail(std::current_exception());
  }
  Lock lock(mutex_);
  for (;;) {
    const auto all_read = [this]() REQUIRES(mutex_) {
      return active_ == 0 && (error_ || next_ == windows_.size());
    };
    changed_.wait(lock, [&]() REQUIRES(mutex_) { return !landings_.empty() || all_read(); });
    if (landings_.empty()) break;
    land();
  }
  end_clock();
  std::vector<uint32_t> checksums;
  for (const Range& range : ranges_) checksums.push_back(range.crc.load());
  note_files(&ended_);
  ended_.ranges = ranges_.size();
  // A task that comes to run later finds an error, or no window.
  next_ = 0;
  windows_.clear();
  ranges_.clear();
  files_.clear();
  if (error_) std::rethrow_exception(error_);
  return checksums;
}

// Waits for the copies of the oldest landing, and gives its slot back. Lets go of mutex_ for the
// time that this takes.
void ReadJob::land() {
  std::list<Landing> oldest;
  oldest.splice(oldest.begin(), landings_, landings_.begin());
  mutex_.unlock();
  try {
    Stopwatch::Lap lap(&copying_, oldest.front().bytes);
    oldest.front().batch.wait();
  } catch (...) {
    fail(std::current_exception());
  }
  oldest.clear();
  mutex_.lock();
}

// Gives the threads a task each. A task reads one window and makes place for the tasks of other
// jobs before the next.
void ReadJob::start() {
  rethrow_if_failed();
  cut();
  const size_t tasks = std::min(windows_.size(), threads_->count());
  for (size_t i = 0; i < tasks; ++i) {
    threads_->submit([job = shared_from_this()] { job->work(); });
  }
}

ReadStatistics ReadJob::statistics() const {
  const Lock lock(mutex_);
  ReadStatistics statistics = ended_;
  if (!files_.empty()) note_files(&statistics);
  if (!ranges_.empty()) statistics.ranges = ranges_.size();
  statistics.bytes_needed = bytes_needed_.load();
  statistics.bytes_read = bytes_read_.load();
  statistics.seconds = seconds();
  statistics.copy_seconds = copying_.seconds();
  statistics.checksum_seconds = checksumming_.seconds();
  statistics.read_seconds = reading_.seconds();
  statistics.slot_waits = slot_waits_.load();
  return statistics;
}

void ReadJob::note_files(ReadStatistics* statistics) const {
  statistics->direct = !files_.empty();
  for (const File& file : files_) {
    if (file.direct()) continue;
    statistics->direct = false;
    statistics->fallback_reason = file.fallback_reason();
  }
}

// Turns ranges into windows: what can be read in place for itself, the rest in the order of the
// file, and merged where near.
void ReadJob::cut() {
  std::vector<Range*> ranges;
  for (Range& range : ranges_) {
    if (range.size > 0) ranges.push_back(&range);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range* a, const Range* b) {
    return std::pair(a->file, a->offset) < std::pair(b->file, b->offset);
  });
  std::vector<Piece> pieces;
  uint64_t read_to = 0;  // of the file that the loop is at
  for (size_t i = 0; i < ranges.size(); ++i) {
    Range* range = ranges[i];
    if (i > 0 && ranges[i - 1]->file != range->file) read_to = 0;
    const uint64_t end = range->offset + range->size;
    const bool last = i + 1 == ranges.size() || ranges[i + 1]->file != range->file;
    // Bytes that two destinations want are read once, into a slot.
    const bool shared = range->offset < read_to || (!last && ranges[i + 1]->offset < end);
    if (shared || !cut_in_place(range, &pieces)) pieces.push_back({range, 0, range->size});
    read_to = std::max(read_to, end);
  }
  const auto offset = [](const Piece& piece) { return piece.range->offset + piece.begin; };
  std::vector<Piece> span;
  uint64_t span_end = 0;
  for (const Piece& piece : pieces) {
    const bool near = !span.empty() && span.front().range->file == piece.range->file &&
                      offset(piece) <= span_end + kMergeGap;
    if (!near && !span.empty()) cut_span(std::exchange(span, {}), span_end);
    const uint64_t end = piece.range->offset + piece.end;
    span_end = span.empty() ? end : std::max(span_end, end);
    span.push_back(piece);
  }
  if (!span.empty()) cut_span(span, span_end);
}

// Where file and memory are aligned alike, the body of a large range needs no slot. What is left of
// it at the ends is added to `rest`.
bool ReadJob::cut_in_place(Range* range, std::vector<Piece>* rest) {
  const Destination& destination = range->destination;
  if (range->size < kInPlaceMin || destination.strided || destination.device) return false;
  const File& file = files_[range->file];
  const uint64_t begin = round_up(range->offset, file.offset_alignment()) - range->offset;
  const uint64_t end =
      round_down(range->offset + range->size, file.offset_alignment()) - range->offset;
  const auto address = reinterpret_cast<uintptr_t>(destination.data + begin);
  if (address % file.memory_alignment() != 0) return false;
  for (uint64_t at = begin; at < end;) {
    const uint64_t step = std::min<uint64_t>(ring_->slot_bytes(), end - at);
    windows_.push_back({range->file, range->offset + at, step, true, {{range, at, at + step}}});
    at += step;
  }
  if (begin > 0) rest->push_back({range, 0, begin});
  if (end < range->size) rest->push_back({range, end, range->size});
  return true;
}

// Cuts one stretch of a file, of pieces in the order of their offsets, into windows of a slot.
void ReadJob::cut_span(const std::vector<Piece>& pieces, uint64_t end) {
  const Range& first = *pieces.front().range;
  const uint64_t alignment =
      std::min<uint64_t>(files_[first.file].offset_alignment(), ring_->slot_bytes());
  const uint64_t slot = round_down(ring_->slot_bytes(), alignment);
  const uint64_t begin = round_down(first.offset + pieces.front().begin, alignment);
  std::vector<Window> windows;
  for (uint64_t at = begin; at < end; at += slot) {
    const uint64_t size = std::min(slot, round_up(end, alignment) - at);
    windows.push_back({first.file, at, size, false, {}});
  }
  for (const Piece& piece : pieces) {
    const uint64_t from = piece.range->offset;
    for (uint64_t at = piece.begin; at < piece.end;) {
      Window& window = windows[(from + at - begin) / slot];
      const uint64_t step = std::min(piece.end, window.offset + window.size - from) - at;
      window.pieces.push_back({piece.range, at, at + step});
      at += step;
    }
  }
  for (Window& window : windows) {
    if (!window.pieces.empty()) windows_.push_back(std::move(window));
  }
}

// Reads one window.
void ReadJob::work() noexcept {
  Lock lock(mutex_);
  if (error_ || next_ == windows_.size()) return;
  const Window& window = windows_[next_++];
  ++active_;
  lock.unlock();
  try {
    read_window(window);
    // Before this one counts as done: the job is not over, so that it will be let in.
    threads_->submit([job = shared_from_this()] { job->work(); });
  } catch (...) {
    fail(std::current_exception());
  }
  lock.lock();
  --active_;
  changed_.notify_all();
}

void ReadJob::read_window(const Window& window) {
  const Piece& last = window.pieces.back();
  if (window.in_place) {
    std::byte* to = last.range->destination.data + last.begin;
    read_exactly(window, to, window.size);
    uint32_t crc = 0;
    checksum(to, window.size, &crc);
    add_checksum(last, crc);
    return;
  }
  bool waited = false;
  std::list<Landing> landing;
  landing.push_back({ring_->acquire(&waited), 0, {}});
  const Slot& slot = landing.front().slot;
  if (waited) slot_waits_.fetch_add(1, std::memory_order_relaxed);
  uint64_t needed = 0;
  for (const Piece& piece : window.pieces) {
    needed = std::max(needed, piece.range->offset + piece.end - window.offset);
  }
  read_exactly(window, slot.data(), needed);
  TransferBatch& batch = landing.front().batch;
  for (const Piece& piece : window.pieces) {
    deliver(piece, slot.data() + (piece.range->offset + piece.begin - window.offset), &batch);
  }
  if (batch.empty()) return;
  landing.front().bytes = needed;
  batch.start_from_host();
  const Lock lock(mutex_);
  landings_.splice(landings_.end(), landing);  // allocates nothing, so that it cannot fail
  changed_.notify_all();
}

// Reads a window; fewer bytes than `needed` are an error.
void ReadJob::read_exactly(const Window& window, std::byte* to, uint64_t needed) {
  Stopwatch::Lap lap(&reading_, window.size);
  File& file = files_[window.file];
  const uint64_t size = file.direct() ? window.size : needed;
  const uint64_t got = file.read(to, size, window.offset);
  bytes_read_.fetch_add(got, std::memory_order_relaxed);
  if (got < needed) {
    throw IoError(EIO, "pread", file.path(),
                  "the file ends at " + std::to_string(window.offset + got) + ", before " +
                      std::to_string(window.offset + needed));
  }
}

// Brings a piece from the slot to where it belongs; on a device, with the rest of the batch.
void ReadJob::deliver(const Piece& piece, const std::byte* from, TransferBatch* batch) {
  const Destination& destination = piece.range->destination;
  const uint64_t size = piece.end - piece.begin;
  uint32_t crc = 0;
  if (destination.device) {
    checksum(from, size, &crc);
    batch->add(destination.device.get(), {destination.data + piece.begin, from, size});
  } else if (destination.strided) {
    for (uint64_t done = 0; done < size;) {
      const uint64_t step = std::min(kCacheBlock, size - done);
      checksum(from + done, step, &crc);
      Stopwatch::Lap lap(&copying_, step);
      destination.strided->scatter(from + done, destination.data, piece.begin + done, step);
      done += step;
    }
  } else {
    // Past the cache: the program computes with few of these bytes soon, and with other data
    // before.
    Stopwatch::Lap lap(&copying_, size);
    std::byte* const to = destination.data + piece.begin;
    if (checksum_) {
      crc = copy_crc32_past_cache(0, to, from, size);
    } else {
      copy_past_cache(to, from, size);
    }
  }
  add_checksum(piece, crc);
}

void ReadJob::checksum(const std::byte* from, uint64_t size, uint32_t* crc) {
  if (!checksum_) return;
  Stopwatch::Lap lap(&checksumming_, size);
  *crc = crc32(*crc, from, size);
}

void ReadJob::add_checksum(const Piece& piece, uint32_t crc) {
  if (!checksum_) return;
  const uint64_t after = piece.range->size - piece.end;
  piece.range->crc.fetch_xor(after == 0 ? crc : crc32_shift(crc, after), std::memory_order_relaxed);
}

}  // namespace pyckpt
