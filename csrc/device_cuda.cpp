// The one place that talks to the CUDA runtime.
#include <cuda_runtime_api.h>

#include <string>

#include "device.h"
#include "error.h"

namespace pyckpt {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw CudaError(std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                  cudaGetErrorString(status));
}

// Makes a device current for the calling thread while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    check(cudaSetDevice(index), "cudaSetDevice");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    DeviceGuard guard(index_);
    // Non-blocking: work on the program's default stream neither waits for a copy nor holds it up.
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override { cudaStreamDestroy(stream_); }

  void copy_to_host(std::byte* to, const std::byte* from, size_t size) override {
    copy(to, from, size, cudaMemcpyDeviceToHost);
  }
  void copy_from_host(std::byte* to, const std::byte* from, size_t size) override {
    copy(to, from, size, cudaMemcpyHostToDevice);
  }

 private:
  void copy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
    DeviceGuard guard(index_);
    check(cudaMemcpyAsync(to, from, size, kind, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  const int index_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void register_host_memory(void* memory, size_t size) {
  // Portable: for all devices of the process, not the current one alone.
  check(cudaHostRegister(memory, size, cudaHostRegisterPortable), "cudaHostRegister");
}

void unregister_host_memory(void* memory) noexcept { cudaHostUnregister(memory); }

std::shared_ptr<Device> make_cuda_device(int index) { return std::make_shared<CudaDevice>(index); }

}  // namespace pyckpt
