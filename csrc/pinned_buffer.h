// Page-aligned host memory that the disk and, once registered, the GPU can reach by DMA.
#pragma once

#include <cstddef>
#include <mutex>

namespace pyckpt {

// Owns one mapping, on huge pages where the kernel offers them. Not touched before first use, so it
// costs address space alone until then. Not thread-safe; the memory itself is anyone's.
class PinnedBuffer {
 public:
  // Throws IoError (ENOMEM). `shared`: has a descriptor by which other processes can map it.
  explicit PinnedBuffer(size_t size, bool shared = false);
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer();

  // Registers the memory with CUDA, once; nothing in a build without CUDA. May be
  // called from several threads. Throws CudaError.
  void pin();

  // Makes the pages of a range be there, so that its first use does not wait for the kernel.
  void touch(size_t offset, size_t size);

  std::byte* data() { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // -1 where it is not shared

 private:
  std::byte* data_;
  size_t size_;
  int descriptor_ = -1;
  std::mutex pinning_;
  bool pinned_ = false;  // guarded by pinning_
};

}  // namespace pyckpt
