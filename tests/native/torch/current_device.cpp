// That csrc/bindings_device.h makes no context on a device that the program does not use: with
// torch's own libc10_cuda, and with these in place of four functions of the CUDA runtime.
// scripts/build_cuda.sh builds and runs it, without a GPU.
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

#include "bindings_device.h"

// Of torch's, which tells it which devices the process has a context on.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(c10::DeviceIndex));
}

namespace {

thread_local int current = 0;
std::mutex mutex;
std::set<int> contexts;

bool has_context(c10::DeviceIndex index) {
  const std::lock_guard lock(mutex);
  return contexts.count(index) != 0;
}

// As a Device does, which leaves its own as the current one.
void use(int device) {
  for (int times = 0; times < 3; ++times) {
    const pyckpt::CurrentDevice current_device(true);
    cudaSetDevice(device);
  }
}

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "current_device: %s\n", what);
  ++failures;
}

c10::DeviceIndex device_of_torch() {
  c10::DeviceIndex index = -1;
  expect(c10::cuda::GetDevice(&index) == cudaSuccess, "torch knows no device");
  return index;
}

}  // namespace

// NOLINTBEGIN: the runtime's names, found before those of the library.
extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

// Since CUDA 12 it makes the context, too.
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(mutex);
  contexts.insert(device);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 8;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND

int main() {
  c10::cuda::_internal::setHasPrimaryContext(&has_context);
  { const pyckpt::CurrentDevice unused(false); }
  expect(contexts.empty(), "a context where no device was used");

  // A thread that never chose a device, of a rank that is not the first.
  std::thread([] {
    use(1);
    expect(device_of_torch() == 0, "a thread without a device has another one than before");
  }).join();
  // The program's thread.
  c10::cuda::set_device(1);
  use(1);
  use(2);
  expect(device_of_torch() == 1, "the program's device was not set back");
  expect(current == 1, "the program's device is set back late, though it has a context");
  expect(contexts == std::set<int>{1, 2}, "a context on a device that nobody used");
  return failures == 0 ? 0 : 1;
}
