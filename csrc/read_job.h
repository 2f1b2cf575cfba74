// Reads ranges of files: disk -> slots -> checksums -> destinations.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "file.h"
#include "io_threads.h"
#include "job.h"
#include "sizes.h"
#include "slot_ring.h"
#include "strided.h"
#include "transfer_batch.h"

namespace pyckpt {

// Memory that a range is read into. It must be there, and be nobody else's, until the job is over.
struct Destination {
  std::byte* data = nullptr;
  std::shared_ptr<const Strided> strided;  // null: the range's bytes go one after another
  std::shared_ptr<Device> device;          // null: host memory
};

// What a job did so far; see WriteStatistics.
struct ReadStatistics {
  uint64_t ranges = 0;
  uint64_t bytes_needed = 0;
  uint64_t bytes_read = 0;
  double seconds = 0;
  double copy_seconds = 0;      // copies out of slots, with their checksums
  double checksum_seconds = 0;  // checksums by themselves
  double read_seconds = 0;
  uint64_t slot_waits = 0;
  bool direct = false;  // for all files
  std::string fallback_reason;
};

// One load. One thread adds files and ranges, then calls `run`, which returns when all is done;
// `statistics` may be called from anywhere. The first error anywhere stops all of it and is thrown.
class ReadJob : public Job, public std::enable_shared_from_this<ReadJob> {
 public:
  // The ring and the threads must outlive the job.
  ReadJob(SlotRing* ring, IoThreads* threads, Direct direct, bool checksum);

  // Opens a file; returns its number.
  size_t add_file(const std::string& path);

  // Adds `size` bytes at `offset` of a file. Returns the range's number. Ranges may overlap in the
  // file.
  size_t add(size_t file, uint64_t offset, uint64_t size, Destination destination);

  // Reads everything, once. Throws IoError, CudaError, EngineClosed. Destinations are filled in any
  // order; after an error some are and some are not. However it ends, no thread touches them any
  // more and the files are closed. Returns the CRC-32 of each range's bytes, by number, gaps of a
  // strided one included; zeros without `checksum`.
  std::vector<uint32_t> run();

  ReadStatistics statistics() const;

 private:
  struct Range {
    size_t file;
    uint64_t offset;
    uint64_t size;
    Destination destination;
    std::atomic<uint32_t> crc{0};
  };
  // Bytes `begin` to `end` of a range, counted from the range's first.
  struct Piece {
    Range* range;
    uint64_t begin;
    uint64_t end;
  };
  // A part of a file that is read at once.
  struct Window {
    size_t file;
    uint64_t offset;
    uint64_t size;
    bool in_place;  // straight into its one piece's destination
    std::vector<Piece> pieces;
  };

  // What was read for devices, and is on its way to them: the slot goes back when it is there.
  struct Landing {
    Slot slot;
    uint64_t bytes;
    TransferBatch batch;
  };

  void start();
  void land() REQUIRES(mutex_);
  void note_files(ReadStatistics* statistics) const REQUIRES(mutex_);
  void cut();
  bool cut_in_place(Range* range, std::vector<Piece>* rest);
  void cut_span(const std::vector<Piece>& pieces, uint64_t end);
  void work() noexcept;
  void read_window(const Window& window);
  void read_exactly(const Window& window, std::byte* to, uint64_t needed);
  void deliver(const Piece& piece, const std::byte* from, TransferBatch* batch);
  void checksum(const std::byte* from, uint64_t size, uint32_t* crc);
  void add_checksum(const Piece& piece, uint32_t crc);

  // Constant after construction.
  SlotRing* const ring_;
  IoThreads* const threads_;
  const Direct direct_;
  const bool checksum_;

  // Grow until `run`, under mutex_ since `statistics` looks at them, and are gone after it.
  std::deque<File> files_;
  std::deque<Range> ranges_;
  std::vector<Window> windows_;

  size_t next_ GUARDED_BY(mutex_) = 0;  // of windows_
  size_t active_ GUARDED_BY(mutex_) = 0;
  // The oldest first. The thread in `run` waits for them and nobody else, so
  // that the engine's threads read on into whatever slots there are, of any job, and none of them
  // waits for a slot that only another one's wait would free.
  std::list<Landing> landings_ GUARDED_BY(mutex_);
  // What there is to know of the files once they are closed.
  ReadStatistics ended_ GUARDED_BY(mutex_);

  std::atomic<uint64_t> bytes_needed_{0};
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> slot_waits_{0};
  Stopwatch copying_{"copy"};
  Stopwatch checksumming_{"checksum"};
  Stopwatch reading_{"read"};
};

}  // namespace pyckpt
