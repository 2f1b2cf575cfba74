// Writes one file: items -> windows -> slots -> checksums -> disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file.h"
#include "image.h"
#include "io_threads.h"
#include "job.h"
#include "slot_ring.h"

namespace pyckpt {

// How many rings' worth of bytes may be queued before the feeder is to wait. More keeps the disk
// busy while a feeder in Python waits for its turn; less takes less memory where it makes what it
// feeds.
constexpr uint64_t kQueuedRings = 4;

struct WriteOptions {
  Direct direct = Direct::kAuto;
  bool sync = true;          // make the file and its name durable before `finish` returns
  uint64_t preallocate = 0;  // bytes the file will have, as far as one knows
};

// What a job did so far; a copy, consistent enough for a progress bar. Times are seconds summed
// over threads, so that with several threads they may add up to more than the time that passed.
struct WriteStatistics {
  uint64_t items = 0;
  uint64_t bytes_added = 0;  // of the file, as far as it is laid out
  uint64_t bytes_written = 0;
  double seconds = 0;           // from the job's start to its end, or to now
  double copy_seconds = 0;      // copies into slots, and their checksums where one pass makes both
  double checksum_seconds = 0;  // checksums by themselves
  double write_seconds = 0;
  double sync_seconds = 0;
  uint64_t slot_waits = 0;  // how often a thread had to wait for a free slot
  bool direct = false;
  std::string fallback_reason;
};

// One file on its way to disk. One thread, the feeder, calls `add` and then `finish` or `abandon`;
// the engine's threads do the work; `statistics` may be called from anywhere.
//
// The first error anywhere stops all of it and is thrown from every later call. A job that was not
// finished, for whatever reason, removes its file.
class WriteJob : public Job, public std::enable_shared_from_this<WriteJob> {
 public:
  // Makes the file (EEXIST where there is one). The ring and the threads must outlive the job.
  static std::shared_ptr<WriteJob> start(SlotRing* ring, IoThreads* threads,
                                         const std::string& path, const WriteOptions& options);
  ~WriteJob() override;

  // Appends an item, without waiting for anything. Returns false where more bytes are queued than
  // kQueuedRings rings hold: a feeder that makes its sources as it goes, and calls `wait_for_room`
  // then, needs no more memory than that.
  bool add(std::shared_ptr<const Envelope> envelope, Source source);
  void wait_for_room();

  // Waits for everything, cuts the file to its length, syncs it and its directory, closes it.
  void finish();

  // Stops as soon as the transfers under way are over, and removes the file. Idempotent, nothrow.
  void abandon() noexcept;

  // How many items, from the first, have been read completely: their sources may go.
  size_t consumed();

  // The items, with places and checksums; complete after `finish`.
  const std::deque<Item>& items() const { return image_.items(); }

  WriteStatistics statistics() const;

 private:
  struct Claim {
    Window window;
    Slot slot;  // none where the window is written in place
  };

  WriteJob(SlotRing* ring, IoThreads* threads, const WriteOptions& options, File file);

  void check_running();
  void publish() REQUIRES(mutex_);
  bool has_room() const REQUIRES(mutex_);
  void close_file();
  void work() noexcept;
  std::optional<Claim> claim();
  bool write_window(const Claim& claim);
  bool fill(const Window& window, std::byte* slot);
  void fetch_from_devices(const Window& window, std::byte* slot);
  void fill_payload(const Piece& piece, std::byte* to);
  void checksum_in_place(const Piece& piece);
  void count_off(const Piece& piece, uint32_t crc);
  bool wait_for_checksum(const Item& item);

  // Constant after construction.
  SlotRing* const ring_;
  IoThreads* const threads_;
  const WriteOptions options_;

  // The feeder's alone.
  Image image_;
  std::vector<Window> full_;
  size_t consumed_ = 0;
  bool ended_ = false;

  File file_;

  std::deque<Window> ready_ GUARDED_BY(mutex_);
  uint64_t ready_bytes_ GUARDED_BY(mutex_) = 0;
  size_t active_ GUARDED_BY(mutex_) = 0;  // windows that a thread is writing

  // Counters, each on its own.
  std::atomic<uint64_t> items_added_{0};
  std::atomic<uint64_t> bytes_added_{0};
  std::atomic<uint64_t> bytes_written_{0};
  Stopwatch copying_{"copy"};
  Stopwatch checksumming_{"checksum"};
  Stopwatch writing_{"write"};
  Stopwatch syncing_{"sync"};
  std::atomic<uint64_t> slot_waits_{0};
};

}  // namespace pyckpt
