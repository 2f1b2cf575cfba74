// Page-aligned host memory that the disk and, once registered, the GPU can reach by DMA.
#pragma once

#include <cstddef>
#include <mutex>

namespace pyckpt {

// Owns one mapping, on huge pages where the kernel offers them. Not touched before first use, so it
// costs address space alone until then. Not thread-safe; the memory itself is anyone's.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t size);  // throws IoError (ENOMEM)
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer();

  // Registers the memory with CUDA at the first call; nothing in a build without CUDA. May be
  // called from several threads. Throws CudaError.
  void pin();

  std::byte* data() { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_;
  size_t size_;
  std::once_flag pin_once_;
  bool pinned_ = false;
};

}  // namespace pyckpt
