// Page-aligned host memory that the disk and, once registered, the GPU can reach by DMA.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <functional>

#include "device.h"
#include "mutex.h"

namespace pyckpt {

// Owns one mapping, on huge pages where the kernel offers them. Not touched before first use, so it
// costs address space alone until then. The memory itself is anyone's.
class PinnedBuffer {
 public:
  // Throws IoError (ENOMEM). `shared`: has a descriptor by which other processes can map it.
  explicit PinnedBuffer(size_t size, bool shared = false);
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer();

  // Registers the memory with CUDA, once, for all devices; nothing in a build without CUDA. Its
  // pages then are there, if they can be near the device that the first call names. Takes long: a
  // tenth of a second a GiB, or several. May be called from several threads. Throws CudaError; what
  // was registered before the error stays so, and another call goes on from there.
  void pin(int device);

  // Makes the pages of a range be there, so that its first use does not wait for the kernel; with
  // several threads where that pays. What they hold stays as it is, while others write to them,
  // too. Throws IoError where the system has not that much memory.
  void populate(size_t offset, size_t size);

  // Does the work of `populate`, and with a device that of `pin`, on this thread alone, and so that
  // others hardly notice: in small pieces, since the kernel locks the process's memory for each.
  // Asks before each whether it `goes_on`, and returns what it heard last. Whoever needs the memory
  // meanwhile populates and pins what is not there yet. Throws as the two do.
  bool warm(size_t offset, size_t size, int device, const std::function<bool()>& goes_on);

  // Whether a device was named to `pin` or `warm`, so that CUDA is asked when this goes.
  bool uses_device() const { return uses_device_.load(std::memory_order_acquire); }

  std::byte* data() { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // -1 where it is not shared

 private:
  size_t piece_end(size_t offset) const;
  size_t choose_device(int device);
  bool register_piece();

  const pid_t process_ = ::getpid();
  std::byte* data_;
  size_t size_;
  int descriptor_ = -1;
  std::atomic<bool> pinned_{false};
  std::atomic<bool> uses_device_{false};
  Mutex pinning_;
  int device_ GUARDED_BY(pinning_) = kNoDevice;
  size_t registered_ GUARDED_BY(pinning_) = 0;  // bytes, from the first
};

}  // namespace pyckpt
