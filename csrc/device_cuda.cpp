// The one place that talks to the CUDA runtime.
#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "device.h"
#include "error.h"

namespace pyckpt {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw CudaError(std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                  cudaGetErrorString(status));
}

class CudaDevice : public Device {
 public:
  CudaDevice(int index, std::function<void()> prepare)
      : index_(index), prepare_(std::move(prepare)) {}
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  void copy_to_host(std::byte* to, const std::byte* from, size_t size) override {
    copy(to, from, size, cudaMemcpyDeviceToHost);
  }
  void copy_from_host(std::byte* to, const std::byte* from, size_t size) override {
    copy(to, from, size, cudaMemcpyHostToDevice);
  }

 private:
  // The thread's current device is set and left so: it is an engine's thread, and setting back
  // device 0 would make a context there, in each process of a node.
  void copy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
    check(cudaSetDevice(index_), "cudaSetDevice");
    std::call_once(prepared_, [this] {
      prepare_();
      // Non-blocking: work on the program's default stream neither waits for a copy nor holds it
      // up.
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
            "cudaStreamCreateWithFlags");
    });
    check(cudaMemcpyAsync(to, from, size, kind, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  const int index_;
  const std::function<void()> prepare_;
  std::once_flag prepared_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void register_host_memory(void* memory, size_t size) {
  // Portable: for all devices of the process, not the current one alone.
  check(cudaHostRegister(memory, size, cudaHostRegisterPortable), "cudaHostRegister");
}

void unregister_host_memory(void* memory) noexcept { cudaHostUnregister(memory); }

std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare) {
  return std::make_shared<CudaDevice>(index, std::move(prepare));
}

}  // namespace pyckpt
