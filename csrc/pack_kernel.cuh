// The kernel of pack.h, for its two sizes.
#pragma once

#include "pack.h"

namespace pyckpt {

template <size_t kCapacity>
__global__ void pack(const __grid_constant__ PackArguments<kCapacity> arguments) {
  for (unsigned i = blockIdx.x; i < arguments.count; i += gridDim.x) {
    copy_chunk(arguments.transfers[i], threadIdx.x, blockDim.x);
  }
}

}  // namespace pyckpt
