// Items -> windows -> their bytes, with checksums: what jobs that make a rank's file have in
// common.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "image.h"
#include "job.h"
#include "slot_ring.h"

namespace pyckpt {

// How many rings' worth of bytes may be queued before the feeder is to wait. More keeps the disk
// busy while a feeder in Python waits for its turn; less takes less memory where it makes what it
// feeds.
constexpr uint64_t kQueuedRings = 4;

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

// One file on its way to wherever it goes. One thread, the feeder, calls `add` and then `finish` or
// `abandon`; `statistics` may be called from anywhere.
//
// The first error anywhere stops all of it and is thrown from every later call.
class FillJob : public Job {
 public:
  // Appends an item, without waiting for anything. Returns false where more bytes are queued than
  // kQueuedRings rings hold: a feeder that makes its sources as it goes, and calls `wait_for_room`
  // then, needs no more memory than that.
  bool add(std::shared_ptr<const Envelope> envelope, Source source);
  void wait_for_room();

  // Waits until the file is where it goes, as a whole.
  virtual void finish() = 0;

  // Stops as soon as what is under way is over, and leaves nothing. Idempotent, nothrow.
  virtual void abandon() noexcept = 0;

  // How many items, from the first, have been read completely: their sources may go.
  size_t consumed();

  // The items, with places and checksums; complete after `finish`.
  const std::deque<Item>& items() const { return image_.items(); }

  virtual WriteStatistics statistics() const;

 protected:
  // The ring must outlive the job.
  FillJob(SlotRing* ring, const Image::Options& options);

  // Called when a window is ready to be filled, under the lock.
  virtual void announce() REQUIRES(mutex_) = 0;

  void check_running();
  // Cuts the last window, and waits until all are filled and gone.
  void drain();
  void stop() noexcept;

  bool fill(const Window& window, std::byte* to);
  void checksum_in_place(const Piece& piece);

  // Constant after construction.
  SlotRing* const ring_;

  // The feeder's alone.
  Image image_;
  bool ended_ = false;

  std::deque<Window> ready_ GUARDED_BY(mutex_);
  uint64_t ready_bytes_ GUARDED_BY(mutex_) = 0;
  size_t active_ GUARDED_BY(mutex_) = 0;  // windows that a thread has taken

  // Counters, each on its own.
  std::atomic<uint64_t> bytes_written_{0};
  std::atomic<uint64_t> slot_waits_{0};
  Stopwatch copying_{"copy"};
  Stopwatch checksumming_{"checksum"};

 private:
  void publish() REQUIRES(mutex_);
  bool has_room() const REQUIRES(mutex_);
  void fetch_from_devices(const Window& window, std::byte* to);
  void fill_payload(const Piece& piece, std::byte* to);
  void count_off(const Piece& piece, uint32_t crc);
  bool wait_for_checksum(const Item& item);

  // The feeder's alone.
  std::vector<Window> full_;
  size_t consumed_ = 0;

  std::atomic<uint64_t> items_added_{0};
  std::atomic<uint64_t> bytes_added_{0};
};

}  // namespace pyckpt
