// Many small copies in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "device.h"

namespace pyckpt {

// Transfers travel to the device as the kernel's parameters. All drivers take 4,096 bytes of them;
// 32,764 those of release 530 and later (CUDA 12.1), from code that was compiled by as new an nvcc.
constexpr size_t kPackTransfersSmall = 160;
#if CUDART_VERSION >= 12010
constexpr size_t kPackTransfers = 1024;
#else
constexpr size_t kPackTransfers = kPackTransfersSmall;
#endif

// What a block copies at a time. The caller cuts what is longer, so that blocks share it.
constexpr size_t kPackChunk = 32 << 10;

template <size_t kCapacity>
struct PackArguments {
  Transfer transfers[kCapacity];
  unsigned count;
};

// The kernels for so many transfers: kPackTransfersSmall (pack_small.cu), or more (pack.cu). Two
// modules, since a driver may refuse to load the second.
const void* small_pack_kernel();
const void* large_pack_kernel();

// Has the kernel for so many transfers loaded to the current device, which would else happen at its
// first launch.
cudaError_t load_pack(size_t capacity);

// Queues `count` copies, kPackTransfers at most, as one kernel. Host memory must be registered, and
// the device able to use the host's addresses for it. Returns what became of this launch, whatever
// errors the thread has met before.
cudaError_t launch_pack(const Transfer* transfers, size_t count, cudaStream_t stream);

#ifdef __CUDACC__
#define PYCKPT_HOST_DEVICE __host__ __device__
#else
#define PYCKPT_HOST_DEVICE
#endif

// What one thread of several does of a copy. Writes go over the bus, where 16 bytes are one
// request as one is: they are as wide as can be whatever the alignment of either side, and the
// reads, from the device's own memory, as wide as the difference of the alignments allows.
//
// Not bound to a GPU, so that tests need none.
template <typename Part>
PYCKPT_HOST_DEVICE void copy_words(std::byte* to, const std::byte* from, size_t words,
                                   unsigned thread, unsigned threads) {
  constexpr size_t kParts = sizeof(uint4) / sizeof(Part);
  for (size_t i = thread; i < words; i += threads) {
    union {
      uint4 word;
      Part parts[kParts];
    } value;
    const auto* const parts = reinterpret_cast<const Part*>(from + i * sizeof(uint4));
    for (size_t k = 0; k < kParts; ++k) value.parts[k] = parts[k];
    reinterpret_cast<uint4*>(to)[i] = value.word;
  }
}

PYCKPT_HOST_DEVICE inline void copy_chunk(const Transfer& transfer, unsigned thread,
                                          unsigned threads) {
  constexpr size_t kWord = sizeof(uint4);
  size_t head = (kWord - reinterpret_cast<uintptr_t>(transfer.to) % kWord) % kWord;
  if (head > transfer.size) head = transfer.size;
  const size_t words = (transfer.size - head) / kWord;
  const size_t tail = head + words * kWord;
  std::byte* const to = transfer.to + head;
  const std::byte* const from = transfer.from + head;
  for (size_t i = thread; i < head; i += threads) transfer.to[i] = transfer.from[i];
  const auto skew = reinterpret_cast<uintptr_t>(from);
  if (skew % sizeof(uint4) == 0) {
    copy_words<uint4>(to, from, words, thread, threads);
  } else if (skew % sizeof(uint2) == 0) {
    copy_words<uint2>(to, from, words, thread, threads);
  } else if (skew % sizeof(uint32_t) == 0) {
    copy_words<uint32_t>(to, from, words, thread, threads);
  } else if (skew % sizeof(uint16_t) == 0) {
    copy_words<uint16_t>(to, from, words, thread, threads);
  } else {
    copy_words<uint8_t>(to, from, words, thread, threads);
  }
  for (size_t i = tail + thread; i < transfer.size; i += threads) {
    transfer.to[i] = transfer.from[i];
  }
}

}  // namespace pyckpt
