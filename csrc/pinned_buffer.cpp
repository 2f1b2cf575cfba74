#include "pinned_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "device.h"
#include "error.h"

namespace pyckpt {

PinnedBuffer::PinnedBuffer(size_t size, bool shared) : size_(size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (shared) {
    flags = MAP_SHARED;
    descriptor_ = ::memfd_create("pyckpt", MFD_CLOEXEC);
    if (descriptor_ < 0) throw IoError(errno, "memfd_create", "", "shared memory");
    if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
      const int error = errno;
      ::close(descriptor_);
      throw IoError(error, "ftruncate", "", std::to_string(size) + " bytes of shared memory");
    }
  }
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, descriptor_, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw IoError(error, "mmap", "", std::to_string(size) + " bytes of memory");
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
  if (descriptor_ >= 0) ::close(descriptor_);
}

void PinnedBuffer::pin() {
#ifdef PYCKPT_CUDA
  std::lock_guard lock(pinning_);
  if (pinned_) return;
  register_host_memory(data_, size_);
  pinned_ = true;
#endif
}

void PinnedBuffer::touch(size_t offset, size_t size) {
  constexpr size_t kPage = 4096;
#ifdef MADV_POPULATE_WRITE
  if (::madvise(data_ + offset, size, MADV_POPULATE_WRITE) == 0) return;
#endif
  // Kernels before 5.14 are asked page by page. What a page holds stays as it is.
  for (size_t at = offset; at < offset + size; at += kPage) {
    auto* const page = reinterpret_cast<volatile std::byte*>(data_ + at);
    *page = *page;
  }
}

}  // namespace pyckpt
