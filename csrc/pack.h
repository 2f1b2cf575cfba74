// Many small copies in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "device.h"

namespace pyckpt {

// Transfers travel to the device as the kernel's parameters, of which CUDA 12.1 and later take
// 32,764 bytes, and earlier ones 4,096.
#if CUDART_VERSION >= 12010
constexpr size_t kPackTransfers = 1024;
#else
constexpr size_t kPackTransfers = 160;
#endif

// Queues `count` copies, kPackTransfers at most, as one kernel. Host memory must be registered, and
// the device able to use the host's addresses for it.
cudaError_t launch_pack(const Transfer* transfers, size_t count, cudaStream_t stream);

}  // namespace pyckpt
