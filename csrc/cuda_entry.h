// What each use of CUDA begins and ends with.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda_status.h"
#include "device.h"
#include "error.h"

namespace pyckpt::cuda {

// The device of the innermost Entry of the calling thread.
inline thread_local int entered_device = kNoDevice;

// Owns the calling thread's mode of stream capture while it lives. The device is made the thread's
// current one: a thread that has none would make a context on device 0. And while this lives, the
// thread may make calls that CUDA else refuses while any thread captures a graph in the global
// mode, torch's default: waiting for an event, registering memory, loading a kernel. Refused, each
// of them also ends that capture with an error. They are safe: nothing that we do is to become part
// of a graph, nor waits for one.
//
// Within another Entry of the thread, this gives that one its device back. After the outermost the
// device stays: setting back device 0 would make a context there, in each process of a node.
class Entry {
 public:
  explicit Entry(int index) : index_(index) {
    check(cudaSetDevice(index), "cudaSetDevice");
    entered_device = index;
    const cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode_);
    if (status == cudaSuccess) return;
    leave();
    check(status, "cudaThreadExchangeStreamCaptureMode");
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() {
    ignore(cudaThreadExchangeStreamCaptureMode(&mode_));
    leave();
  }

 private:
  void leave() noexcept {
    entered_device = outer_;
    if (outer_ != kNoDevice && outer_ != index_) ignore(cudaSetDevice(outer_));
  }

  const int index_;
  const int outer_ = entered_device;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // the thread's own meanwhile
};

// For destructors, which give things back as well as they can.
template <typename Function>
void enter_or_ignore(int index, Function function) noexcept {
  try {
    const Entry entry(index);
    function();
  } catch (const CudaError&) {
    // The device is lost. What other devices use is to be given back nonetheless.
    function();
  }
}

// Whether a stream captures a graph. Within an Entry.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  return capture != cudaStreamCaptureStatusNone;
}

}  // namespace pyckpt::cuda
