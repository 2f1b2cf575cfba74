// Which memory was written since it was last looked at, as the kernel knows it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "mutex.h"
#include "thread_annotations.h"

namespace pyckpt {

// Has the kernel note writes to memory of this process (userfaultfd's asynchronous write
// protection; from Linux 6.13 on): the first write to each page takes a fault, which the kernel
// settles by itself, and nobody waits. Whoever writes is noticed, as long as it writes through this
// process's page tables: each thread, each system call that fills memory, direct I/O that begins
// later. So is memory that is unmapped, mapped anew, moved or given back (MADV_DONTNEED).
//
// Not noticed is who got hold of a page before it was watched, and writes to it later past the page
// tables: a device (see `pinned`), or a debugger at that instant. Memory of files, of devices, and
// shared with other processes is refused.
//
// Thread-safe. In a forked child it knows nothing and does nothing.
class PageWatch {
 public:
  // Throws IoError where the kernel does not offer this, or does not let this process have it.
  PageWatch();
  PageWatch(const PageWatch&) = delete;
  PageWatch& operator=(const PageWatch&) = delete;
  ~PageWatch();

  // From now on, notes whether these bytes are written. Returns a number by which `is_unwritten` is
  // asked, or 0 if that cannot be had: for memory that is shared, of a file, or watched by others.
  // What was said of memory that overlaps with this, and is not the same, is forgotten.
  uint64_t watch(const std::byte* data, size_t size);

  // Whether it is certain that nobody has written to these bytes since the `watch` that returned
  // this number. They must be there. A write of the same value counts where pages are written.
  bool is_unwritten(const std::byte* data, size_t size, uint64_t since);

  // Watches these bytes no more.
  void forget(const std::byte* data, uint64_t since);

  // Watches nothing more.
  void close();

  // Whether this process has memory that devices write without the processor (InfiniBand, buffers
  // registered with io_uring), as far as the kernel counts it.
  static bool pinned();

 private:
  // Whole pages are left to the kernel. The bytes before and behind them share their pages with
  // other memory, which may be written all the time: they are kept, and compared.
  struct Entry {
    size_t size;
    uint64_t since;
    std::vector<std::byte> head;
    std::vector<std::byte> tail;
  };

  bool is_forked() const;
  bool register_pages(uintptr_t begin, uintptr_t end) const REQUIRES(mutex_);
  bool is_ours_alone(uintptr_t begin, uintptr_t end) const REQUIRES(mutex_);
  bool is_clean(uintptr_t begin, uintptr_t end) const REQUIRES(mutex_);
  bool protect(uintptr_t begin, uintptr_t end) const REQUIRES(mutex_);
  void unregister(uintptr_t begin, uintptr_t end) const REQUIRES(mutex_);
  void close_all() REQUIRES(mutex_);

  const pid_t process_;
  const uintptr_t page_;

  Mutex mutex_;
  int faults_ GUARDED_BY(mutex_) = -1;    // the userfaultfd
  int pages_ GUARDED_BY(mutex_) = -1;     // /proc/self/pagemap
  int mappings_ GUARDED_BY(mutex_) = -1;  // /proc/self/maps
  uint64_t watches_ GUARDED_BY(mutex_) = 0;
  std::map<uintptr_t, Entry> entries_ GUARDED_BY(mutex_);  // by the address of the first byte
};

}  // namespace pyckpt
