// Writes one file: items -> windows -> slots -> checksums -> disk.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "file.h"
#include "fill_job.h"
#include "io_threads.h"

namespace pyckpt {

struct WriteOptions {
  Direct direct = Direct::kAuto;
  bool sync = true;          // make the file and its name durable before `finish` returns
  uint64_t preallocate = 0;  // bytes the file will have, as far as one knows
};

// One file on its way to disk; the engine's threads do the work. A job that was not finished, for
// whatever reason, removes its file.
class WriteJob : public FillJob, public std::enable_shared_from_this<WriteJob> {
 public:
  // Makes the file (EEXIST where there is one). The ring and the threads must outlive the job.
  static std::shared_ptr<WriteJob> start(SlotRing* ring, IoThreads* threads,
                                         const std::string& path, const WriteOptions& options);
  ~WriteJob() override;

  // Waits for everything, cuts the file to its length, syncs it and its directory, closes it.
  void finish() override;

  // Removes the file, too.
  void abandon() noexcept override;

  WriteStatistics statistics() const override;

 private:
  struct Claim {
    Window window;
    Slot slot;  // none where the window is written in place
  };

  WriteJob(SlotRing* ring, IoThreads* threads, const WriteOptions& options, File file);

  void announce() override REQUIRES(mutex_);
  void close_file();
  void work() noexcept;
  std::optional<Claim> claim();
  bool write_window(const Claim& claim);

  // Constant after construction.
  IoThreads* const threads_;
  const WriteOptions options_;

  File file_;

  Stopwatch writing_{"write"};
  Stopwatch syncing_{"sync"};
};

}  // namespace pyckpt
