// Memory that the host cannot read by itself.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace pyckpt {

// One accelerator. Safe to call from any thread.
class Device {
 public:
  virtual ~Device() = default;

  // Copy to and from host memory; the bytes are there when they return. Throw CudaError.
  virtual void copy_to_host(std::byte* to, const std::byte* from, size_t size) = 0;
  virtual void copy_from_host(std::byte* to, const std::byte* from, size_t size) = 0;
};

#ifdef PYCKPT_CUDA
// Page-locks host memory, so that devices reach it by DMA, and lets it go again.
void register_host_memory(void* memory, size_t size);
void unregister_host_memory(void* memory) noexcept;

// The CUDA device of that index, with a stream of its own that runs apart from the program's. Its
// copies make it the calling thread's current device, and are for threads of an engine alone.
// Before the first it calls `prepare`.
std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare);
#endif

}  // namespace pyckpt
