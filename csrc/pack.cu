// The kernel of pack.h. A few blocks are enough to fill the bus, and leave the multiprocessors to
// the program.
#include <cstdint>
#include <cstring>

#include "pack.h"

namespace pyckpt {
namespace {

constexpr unsigned kBlocks = 32;
constexpr unsigned kThreads = 512;

struct Arguments {
  Transfer transfers[kPackTransfers];
  unsigned count;
};

// Copies as many whole values as there are, one a thread and turn; neighbours in a warp touch
// neighbours in memory. Returns how many bytes that was.
template <typename Value>
__device__ size_t copy_values(std::byte* to, const std::byte* from, size_t size) {
  const size_t count = size / sizeof(Value);
  auto* const values_to = reinterpret_cast<Value*>(to);
  const auto* const values_from = reinterpret_cast<const Value*>(from);
  for (size_t i = threadIdx.x; i < count; i += blockDim.x) values_to[i] = values_from[i];
  return count * sizeof(Value);
}

__global__ void pack(const __grid_constant__ Arguments arguments) {
  for (unsigned i = blockIdx.x; i < arguments.count; i += gridDim.x) {
    const Transfer& transfer = arguments.transfers[i];
    const auto addresses =
        reinterpret_cast<uintptr_t>(transfer.to) | reinterpret_cast<uintptr_t>(transfer.from);
    size_t done = 0;
    if (addresses % sizeof(uint4) == 0) {
      done = copy_values<uint4>(transfer.to, transfer.from, transfer.size);
    } else if (addresses % sizeof(uint32_t) == 0) {
      done = copy_values<uint32_t>(transfer.to, transfer.from, transfer.size);
    }
    copy_values<uint8_t>(transfer.to + done, transfer.from + done, transfer.size - done);
  }
}

}  // namespace

cudaError_t launch_pack(const Transfer* transfers, size_t count, cudaStream_t stream) {
  Arguments arguments;
  std::memcpy(arguments.transfers, transfers, count * sizeof(Transfer));
  arguments.count = static_cast<unsigned>(count);
  const unsigned blocks = count < kBlocks ? arguments.count : kBlocks;
  // clang-format off
  pack<<<blocks, kThreads, 0, stream>>>(arguments);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace pyckpt
