#include "pinned_buffer.h"

#include <sys/mman.h>

#include <cerrno>

#include "device.h"
#include "error.h"

namespace pyckpt {

PinnedBuffer::PinnedBuffer(size_t size) : size_(size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw IoError(errno, "mmap", "", std::to_string(size) + " bytes of anonymous memory");
  }
  data_ = static_cast<std::byte*>(memory);
  // A wish: fewer page faults, and fewer pages for the kernel to pin at each direct transfer. Where
  // it is not granted, nothing but speed is lost.
  ::madvise(memory, size, MADV_HUGEPAGE);
  // A fork while a transfer is under way would make the pages copy-on-write: the disk or the GPU
  // would go on with the old ones and the process with new ones. So a child does not get them at
  // all.
  ::madvise(memory, size, MADV_DONTFORK);
}

PinnedBuffer::~PinnedBuffer() {
#ifdef PYCKPT_CUDA
  if (pinned_) unregister_host_memory(data_);
#endif
  ::munmap(data_, size_);
}

void PinnedBuffer::pin() {
#ifdef PYCKPT_CUDA
  std::call_once(pin_once_, [this] {
    register_host_memory(data_, size_);
    pinned_ = true;
  });
#endif
}

}  // namespace pyckpt
