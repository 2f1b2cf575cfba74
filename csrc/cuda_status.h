// What the CUDA runtime's calls return becomes exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "error.h"

namespace pyckpt::cuda {

// Throws CudaError, which names the call.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // whoever asks for the last error next did not make this one
  throw CudaError(std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                  cudaGetErrorString(status));
}

// For what nobody can be told of: destructors give things back as well as they can.
inline void ignore(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
}

}  // namespace pyckpt::cuda
