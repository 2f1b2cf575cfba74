// The CUDA device that a thread of the program computes on, which torch keeps.
#pragma once

#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace pyckpt {

// Leaves the calling thread's current CUDA device as it was, which a Device does not. Does nothing
// without CUDA, or where the caller knows that no device is used.
//
// Not torch's OptionalCUDAGuard. Where the process has no context on the thread's device, as ranks
// other than 0 have none on device 0, that guard's destructor leaves the device as one that torch
// sets later; and the next guard then sets it at once, which makes a context there.
class CurrentDevice {
 public:
  explicit CurrentDevice([[maybe_unused]] bool uses_devices) {
#ifdef PYCKPT_CUDA
    // Not in a forked child, which cannot use CUDA, nor where there is no driver.
    is_known_ = uses_devices && c10::cuda::GetDevice(&index_) == cudaSuccess;
#endif
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

#ifdef PYCKPT_CUDA
  // Sets the device now only where the process has a context on it, so that none is made; else
  // torch sets it at its next use. An error is a lost device's, of which torch's next call tells.
  ~CurrentDevice() {
    if (is_known_) (void)c10::cuda::MaybeSetDevice(index_);
  }

 private:
  c10::DeviceIndex index_ = 0;
  bool is_known_ = false;
#endif
};

}  // namespace pyckpt
