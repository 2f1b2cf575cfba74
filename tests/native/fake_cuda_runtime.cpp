// The functions of the CUDA runtime that csrc calls, and the kernels. Parameters have the names
// that the runtime's documentation gives them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_cuda_world.h"
#include "pack.h"

using namespace pyckpt;
using namespace pyckpt::test::fake;

namespace {

// Kernels come to a device when they are first needed there, which is not safe during a capture.
cudaError_t load(World& w, const void* kernel, int device) {
  if (w.loaded.count({kernel, device}) != 0) return cudaSuccess;
  const cudaError_t error = enter_unsafe(w, "(load)", device);
  if (error == cudaSuccess) w.loaded.insert({kernel, device});
  return error;
}

// The kernel of pack.h, by the host: what blocks and threads do, one after another.
template <size_t kCapacity>
cudaError_t launch(const void* kernel, dim3 blocks, dim3 threads, void** parameters,
                   cudaStream_t stream) {
  constexpr const char* kFunction = "cudaLaunchKernel";
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const on = find_alive(w, stream, kFunction);
  if (on == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter_stream(w, kFunction, on); error != cudaSuccess) return error;
  if (on->device != thread_state().device) {
    misuse(w, "a kernel was launched on a stream of another device than the current one");
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (sizeof(PackArguments<kCapacity>) > w.parameter_limit) return failed(cudaErrorInvalidValue);
  if (const cudaError_t error = load(w, kernel, on->device); error != cudaSuccess) return error;
  const auto& arguments = *static_cast<const PackArguments<kCapacity>*>(parameters[0]);
  const size_t count = arguments.count;
  if (count == 0 || count > kCapacity) misuse(w, "a kernel of too many copies, or of none");
  if (blocks.x == 0 || blocks.x > count || threads.x == 0) {
    misuse(w, "a kernel of blocks that have nothing to do, or of none");
  }
  if (!w.same_addresses) misuse(w, "a kernel was given host addresses that it cannot use");
  const std::vector<Transfer> transfers(arguments.transfers, arguments.transfers + count);
  if (const cudaError_t error = wait_for_room(w, &lock, on); error != cudaSuccess) {
    return error;
  }
  Operation operation;
  for (const Transfer& transfer : transfers) {
    const Range target{transfer.to, transfer.size};
    const Range source{transfer.from, transfer.size};
    check_copy(w, kFunction, target, source, cudaHostRegisterMapped, true);
    operation.touches.push_back(target);
    operation.touches.push_back(source);
  }
  if (on->capturing) return cudaSuccess;
  operation.copies = count;
  operation.work = copying(w, operation.touches, [transfers] {
    constexpr unsigned kThreads = 3;  // any number will do, and these are not in parallel
    for (const Transfer& transfer : transfers) {
      for (unsigned thread = 0; thread < kThreads; ++thread) copy_chunk(transfer, thread, kThreads);
    }
  });
  w.launches.push_back(count);
  queue(w, on, std::move(operation));
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaSetDevice(int device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (device < 0 || static_cast<size_t>(device) >= w.lost.size()) {
    return failed(cudaErrorInvalidDevice);
  }
  const cudaError_t error = enter(w, __func__, device, /*of_thread=*/false);
  if (error == cudaSuccess) thread_state().device = device;
  return error;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (const cudaError_t error = enter(w, __func__, device); error != cudaSuccess) return error;
  if (attribute != cudaDevAttrCanUseHostPointerForRegisteredMem) {
    misuse(w, "cudaDeviceGetAttribute of an attribute that the fake does not know");
    return failed(cudaErrorInvalidValue);
  }
  *value = w.same_addresses ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const int device = thread_state().device;
  if (const cudaError_t error = enter_unsafe(w, __func__, device); error != cudaSuccess) {
    return error;
  }
  const bool blocking = (flags & cudaStreamNonBlocking) == 0;
  *stream = reinterpret_cast<cudaStream_t>(add_stream(w, device, blocking, false));
  return cudaSuccess;
}

// Returns at once; what is queued still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const state = find_alive(w, stream, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const cudaError_t error = enter_unsafe(w, __func__, state->device);
  if (state->waited_for > 0) misuse(w, "a stream was destroyed while a thread waits for it");
  state->alive = false;
  w.changed.notify_all();
  return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const StreamState* const state = find_alive(w, stream, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter(w, __func__, state->device); error != cudaSuccess) {
    return error;
  }
  for (const auto& other : w.streams) {
    if (state->legacy && other->capturing && other->blocking && other->device == state->device) {
      return failed(cudaErrorStreamCaptureImplicit);  // and the capture goes on
    }
  }
  *status = state->invalidated ? cudaStreamCaptureStatusInvalidated
            : state->capturing ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const state = find_alive(w, stream, __func__);
  const EventState* const of = find_alive(w, event, __func__);
  if (state == nullptr || of == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const cudaError_t error = enter_stream(w, __func__, state);
  if (error != cudaSuccess) return error;
  if (state->capturing && !of->captured) {
    state->invalidated = true;
    return failed(cudaErrorStreamCaptureIsolation);
  }
  if (!state->capturing && of->captured) {
    // As CUDA has it: the stream becomes a part of the graph.
    misuse(w, "a stream joined the capture of a graph");
    return cudaSuccess;
  }
  if (!of->recorded || state->capturing) return cudaSuccess;
  if (const cudaError_t error = wait_for_room(w, &lock, state); error != cudaSuccess) {
    return error;
  }
  Operation operation;
  operation.after.push_back(of->recorded);
  queue(w, state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const state = find_alive(w, stream, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter_unsafe(w, __func__, state->device); error != cudaSuccess) {
    return error;
  }
  if (state->capturing) {
    state->invalidated = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  ++state->waited_for;
  const cudaError_t error = wait_for(w, &lock, state->last, state->device);
  --state->waited_for;
  return error;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const int device = thread_state().device;
  if (const cudaError_t error = enter(w, __func__, device); error != cudaSuccess) return error;
  w.events.push_back(std::make_unique<EventState>());
  w.events.back()->device = device;
  w.events.back()->flags = flags;
  *event = reinterpret_cast<cudaEvent_t>(w.events.back().get());
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  EventState* const state = find_alive(w, event, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const cudaError_t error = enter_unsafe(w, __func__, state->device);
  state->alive = false;
  return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const on = find_alive(w, stream, __func__);
  EventState* const state = find_alive(w, event, __func__);
  if (on == nullptr || state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter_stream(w, __func__, on); error != cudaSuccess) return error;
  if (on->device != state->device) {
    misuse(w, "an event of one device was recorded on a stream of another");
    return failed(cudaErrorInvalidResourceHandle);
  }
  state->captured = on->capturing;
  if (on->capturing) return cudaSuccess;
  if (const cudaError_t error = wait_for_room(w, &lock, on); error != cudaSuccess) {
    return error;
  }
  Operation operation;
  state->recorded = operation.mark;
  queue(w, on, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  const EventState* const state = find_alive(w, event, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter_unsafe(w, __func__, state->device); error != cudaSuccess) {
    return error;
  }
  if (state->captured) return failed(cudaErrorCapturedEvent);
  if ((state->flags & cudaEventBlockingSync) == 0) {
    misuse(w, "cudaEventSynchronize spins: the event was made without cudaEventBlockingSync");
  }
  return wait_for(w, &lock, state->recorded, state->device);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const on = find_alive(w, stream, __func__);
  if (on == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter_stream(w, __func__, on); error != cudaSuccess) return error;
  const Range target{static_cast<const std::byte*>(to), count};
  const Range source{static_cast<const std::byte*>(from), count};
  if (kind == cudaMemcpyDeviceToHost) {
    check_copy(w, __func__, target, source, 0, false);
  } else if (kind == cudaMemcpyHostToDevice) {
    check_copy(w, __func__, source, target, 0, false);
  } else {
    misuse(w, "cudaMemcpyAsync of a kind that the fake does not know");
  }
  if (on->capturing) return cudaSuccess;
  if (const cudaError_t error = wait_for_room(w, &lock, on); error != cudaSuccess) {
    return error;
  }
  Operation operation;
  operation.touches = {target, source};
  operation.work = copying(w, operation.touches, [=] { std::memcpy(to, from, count); });
  operation.copies = 1;
  queue(w, on, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t size, unsigned flags) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  if (const auto gate = std::exchange(w.registration_gate, {}); gate.valid()) {
    ++w.waiting;
    w.changed.notify_all();
    lock.unlock();
    gate.wait();
    lock.lock();
    --w.waiting;
  }
  const int device = thread_state().device;
  if (const cudaError_t error = enter_unsafe(w, __func__, device); error != cudaSuccess) {
    return error;
  }
  const Range range{static_cast<const std::byte*>(memory), size};
  if (size == 0 || !is_mapped(range)) {
    misuse(w, "memory was registered that is not there");
    return failed(cudaErrorInvalidValue);
  }
  size_t registered = size;
  for (const auto& one : w.registrations) registered += one.second.size;
  if (registered > w.registration_limit) return failed(cudaErrorMemoryAllocation);
  for (const auto& [data, registration] : w.registrations) {
    if (!overlap(range, {data, registration.size})) continue;
    misuse(w, "host memory was registered twice");
    return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  if (w.lost.size() > 1 && (flags & cudaHostRegisterPortable) == 0) {
    misuse(w, "host memory was registered for one device of several");
  }
  w.registrations[range.data] = {size, flags};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const auto found = w.registrations.find(static_cast<const std::byte*>(memory));
  if (found == w.registrations.end()) {
    misuse(w, "cudaHostUnregister of memory that is not registered");
    return failed(cudaErrorHostMemoryNotRegistered);
  }
  const cudaError_t error = enter_unsafe(w, __func__, thread_state().device);
  if (error == cudaErrorStreamCaptureUnsupported) return error;
  const Range range{found->first, found->second.size};
  if (is_touched(w, range)) {
    misuse(w, "host memory was unregistered while a queued copy touches it");
  }
  if (!is_mapped(range)) misuse(w, "memory was unmapped while it was registered");
  w.registrations.erase(found);
  return error;
}

cudaError_t cudaGetLastError() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const cudaError_t error = std::exchange(thread_state().last_error, cudaSuccess);
  return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  // It may be the first call of a thread.
  const cudaError_t error = enter(w, __func__, thread_state().device);
  if (error == cudaSuccess) std::swap(*mode, thread_state().mode);
  return error;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const cudaError_t error = enter(w, __func__, device);
  if (error == cudaSuccess) {
    std::snprintf(id, static_cast<size_t>(size), "0000:%02X:00.0", 0xa0 + device);
  }
  return error;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const int device = thread_state().device;
  if (const cudaError_t error = enter(w, __func__, device); error != cudaSuccess) return error;
  *attributes = {};
  return load(w, kernel, device);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** parameters,
                             size_t, cudaStream_t stream) {
  return kernel == large_pack_kernel()
             ? launch<kPackTransfers>(kernel, blocks, threads, parameters, stream)
             : launch<kPackTransfersSmall>(kernel, blocks, threads, parameters, stream);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "cudaErrorUnknown";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "unknown error";
  }
}

}  // extern "C"

namespace pyckpt {

// In place of the kernels of pack.cu and pack_small.cu: what is told apart by its address.
const void* small_pack_kernel() {
  static const char kernel = 0;
  return &kernel;
}

const void* large_pack_kernel() {
  static const char kernel = 0;
  return &kernel;
}

}  // namespace pyckpt
