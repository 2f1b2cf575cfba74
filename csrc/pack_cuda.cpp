// The host's half of pack.h.
#include <algorithm>
#include <cstring>

#include "pack.h"

namespace pyckpt {
namespace {

// A few blocks are enough to fill the bus, and leave the multiprocessors to the program.
constexpr size_t kBlocks = 32;
constexpr unsigned kThreads = 512;

const void* kernel_for(size_t count) {
  return count <= kPackTransfersSmall ? small_pack_kernel() : large_pack_kernel();
}

template <size_t kCapacity>
cudaError_t launch(const Transfer* transfers, size_t count, cudaStream_t stream) {
  PackArguments<kCapacity> arguments;
  std::memcpy(arguments.transfers, transfers, count * sizeof(Transfer));
  arguments.count = static_cast<unsigned>(count);
  void* parameters[] = {&arguments};
  const dim3 blocks(static_cast<unsigned>(std::min(count, kBlocks)));
  return cudaLaunchKernel(kernel_for(count), blocks, dim3(kThreads), parameters, 0, stream);
}

}  // namespace

cudaError_t load_pack(size_t capacity) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel_for(capacity));
}

cudaError_t launch_pack(const Transfer* transfers, size_t count, cudaStream_t stream) {
  return count <= kPackTransfersSmall ? launch<kPackTransfersSmall>(transfers, count, stream)
                                      : launch<kPackTransfers>(transfers, count, stream);
}

}  // namespace pyckpt
