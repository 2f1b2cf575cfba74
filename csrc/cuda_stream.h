// Queues of work of a device.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda_entry.h"
#include "cuda_status.h"

namespace pyckpt::cuda {

// Owns one stream of a device, once `make` was called. Not thread-safe while that runs.
class OwnedStream {
 public:
  explicit OwnedStream(int index) : index_(index) {}
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream() {
    if (stream_ == nullptr) return;
    enter_or_ignore(index_, [this] { ignore(cudaStreamDestroy(stream_)); });
  }

  // Non-blocking: work on the program's default stream neither waits for a copy nor holds it up.
  // Does nothing where the stream is there. Within an Entry. Throws CudaError.
  void make() {
    if (stream_ != nullptr) return;
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }

  cudaStream_t get() const { return stream_; }

 private:
  const int index_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace pyckpt::cuda
