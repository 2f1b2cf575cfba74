// Copies out of the memory of other processes of the host: their memory -> ours, in one step.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "io_threads.h"
#include "job.h"

namespace pyckpt {

// One load's copies. One thread adds, then calls `run`, which returns when all is done. The kernel
// copies as a debugger reads (process_vm_readv), and refuses where a debugger would be refused.
class PeerJob : public Job, public std::enable_shared_from_this<PeerJob> {
 public:
  // The threads must outlive the job.
  explicit PeerJob(IoThreads* threads) : threads_(threads) {}

  // Adds `size` bytes of a process. Until the job is over the process must not change them, and
  // nobody else may use `to`. If the process ends, and another one gets its number, the bytes mean
  // nothing: the caller must ask it afterwards whether it is still there.
  void add(pid_t process, uint64_t address, std::byte* to, uint64_t size);

  // Copies everything, once. Throws IoError (ESRCH: no such process, EPERM: it may not be read,
  // EFAULT: not its memory) and EngineClosed; some bytes are copied then and some are not. However
  // it ends, no thread touches them any more.
  void run();

 private:
  struct Range {
    pid_t process;
    uint64_t address;
    std::byte* to;
    uint64_t size;
  };
  // What a thread copies with one call: a piece of a large range, or some small ranges.
  struct Unit {
    size_t begin;
    size_t end;
  };

  void cut();
  void work() noexcept;

  IoThreads* const threads_;

  // Grow until `run`, and are gone after it.
  std::vector<Range> ranges_;
  std::vector<Unit> units_;

  size_t next_ GUARDED_BY(mutex_) = 0;  // of units_
  size_t active_ GUARDED_BY(mutex_) = 0;
};

// Where the kernel lets only parents read their children (Yama's ptrace_scope 1): lets any process
// of this user read this one, or no other again. Returns false where the kernel knows no such rule.
bool let_peers_read(bool allowed);

}  // namespace pyckpt
