// Gives away one file's bytes in their order: items -> windows -> checksums -> whoever takes them.
#pragma once

#include <cstddef>
#include <memory>

#include "fill_job.h"

namespace pyckpt {

// One file on its way out of this program, window by window. No thread of the engine works for it:
// they would wait for a network, and other jobs for them. The thread that takes a window fills it.
//
// One thread feeds, and at the same time one other, the taker, calls `next_size` and `take` in
// turn.
class StreamJob : public FillJob {
 public:
  // The ring must outlive the job. Of its slots the job uses one, for what comes from devices.
  explicit StreamJob(SlotRing* ring);
  ~StreamJob() override;

  // Waits until there is a window. Returns its bytes; 0 after the last, once the feeder is done.
  size_t next_size();
  // Puts that window's bytes there.
  void take(std::byte* to);

  // Waits until all is taken.
  void finish() override;
  void abandon() noexcept override;

 private:
  void announce() override REQUIRES(mutex_) { changed_.notify_all(); }
  void fill_window(const Window& window, std::byte* to);

  bool complete_ GUARDED_BY(mutex_) = false;  // the feeder is done
};

}  // namespace pyckpt
