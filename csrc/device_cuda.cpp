// The one place that talks to the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "error.h"
#include "pack.h"

namespace pyckpt {
namespace {

// Above that a copy of its own costs less than what it keeps the kernel's blocks busy.
constexpr size_t kPackMax = 256 << 10;

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // whoever asks for the last error next did not make this one
  throw CudaError(std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                  cudaGetErrorString(status));
}

// For what nobody can be told of: destructors give things back as well as they can.
void ignore(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
}

// The events of one device, used again and again: making one takes a lock of the driver.
class EventPool {
 public:
  ~EventPool() {
    for (cudaEvent_t event : free_) ignore(cudaEventDestroy(event));
  }

  // The device must be the thread's current one.
  cudaEvent_t take() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event;
    // Whoever waits sleeps, and leaves the processor to the program.
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreateWithFlags");
    return event;
  }

  void give_back(cudaEvent_t event) noexcept {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;  // guarded by mutex_
};

class PooledEvent {
 public:
  explicit PooledEvent(std::shared_ptr<EventPool> pool)
      : pool_(std::move(pool)), event_(pool_->take()) {}
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;
  ~PooledEvent() { pool_->give_back(event_); }

  cudaEvent_t get() const { return event_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  const cudaEvent_t event_;
};

class CudaTicket : public Ticket {
 public:
  CudaTicket(int index, std::shared_ptr<EventPool> pool) : index_(index), event_(std::move(pool)) {}

  void record(cudaStream_t stream) {
    check(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

  void wait() override {
    // Without a current device, waiting would make a context on device 0.
    check(cudaSetDevice(index_), "cudaSetDevice");
    check(cudaEventSynchronize(event_.get()), "cudaEventSynchronize");
  }

  cudaEvent_t event() const { return event_.get(); }

 private:
  const int index_;
  const PooledEvent event_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int index, std::function<void()> prepare)
      : index_(index), prepare_(std::move(prepare)) {}
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override {
    if (to_host_ != nullptr) ignore(cudaStreamDestroy(to_host_));
    if (from_host_ != nullptr) ignore(cudaStreamDestroy(from_host_));
  }

  int index() const override { return index_; }

  std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>& transfers) override {
    enter();
    return copy(transfers, cudaMemcpyDeviceToHost, to_host_);
  }

  std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) override {
    enter();
    return copy(transfers, cudaMemcpyHostToDevice, from_host_);
  }

  void follow(Stream stream) override {
    enter();
    const auto program = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(program, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) {
      throw CudaError("the current stream is capturing a graph, which cannot copy state");
    }
    const PooledEvent event(events_);
    check(cudaEventRecord(event.get(), program), "cudaEventRecord");
    check(cudaStreamWaitEvent(to_host_, event.get(), 0), "cudaStreamWaitEvent");
    check(cudaStreamWaitEvent(from_host_, event.get(), 0), "cudaStreamWaitEvent");
  }

  void hold(Stream stream, const Ticket& ticket) override {
    enter();
    const auto& copies = static_cast<const CudaTicket&>(ticket);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), copies.event(), 0),
          "cudaStreamWaitEvent");
  }

  Stream to_host() override {
    enter();
    return to_host_;
  }

 private:
  // The thread's current device is set and left so: setting back device 0 would make a context
  // there, in each process of a node.
  void enter() {
    check(cudaSetDevice(index_), "cudaSetDevice");
    if (prepared_.load(std::memory_order_acquire)) return;
    // Not std::call_once: where its function throws, as this may, other threads hang with some
    // C libraries and sanitizers.
    std::lock_guard lock(preparing_);
    if (prepared_.load(std::memory_order_relaxed)) return;
    prepare_();
    int same_addresses = 0;
    check(cudaDeviceGetAttribute(&same_addresses, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                 index_),
          "cudaDeviceGetAttribute");
    packs_ = same_addresses != 0;
    // Non-blocking: work on the program's default stream neither waits for a copy nor holds it up.
    // The first may be there from an attempt at which the second failed.
    for (cudaStream_t* stream : {&to_host_, &from_host_}) {
      if (*stream != nullptr) continue;
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    prepared_.store(true, std::memory_order_release);
  }

  std::shared_ptr<Ticket> copy(const std::vector<Transfer>& transfers, cudaMemcpyKind kind,
                               cudaStream_t stream) {
    auto ticket = std::make_shared<CudaTicket>(index_, events_);
    try {
      queue(transfers, kind, stream);
      ticket->record(stream);
    } catch (...) {
      // What was queued before the error must not outlive the memory, of which the caller now
      // thinks that nobody uses it.
      ignore(cudaStreamSynchronize(stream));
      throw;
    }
    return ticket;
  }

  void queue(const std::vector<Transfer>& transfers, cudaMemcpyKind kind, cudaStream_t stream) {
    // Reading from the host, a kernel's threads would wait for the bus at each value.
    const bool packs = packs_ && kind == cudaMemcpyDeviceToHost && transfers.size() > 1;
    std::vector<Transfer> small;
    for (const Transfer& transfer : transfers) {
      if (packs && transfer.size <= kPackMax) {
        small.push_back(transfer);
      } else {
        check(cudaMemcpyAsync(transfer.to, transfer.from, transfer.size, kind, stream),
              "cudaMemcpyAsync");
      }
    }
    for (size_t i = 0; i < small.size(); i += kPackTransfers) {
      check(launch_pack(small.data() + i, std::min(kPackTransfers, small.size() - i), stream),
            "the kernel that packs small copies");
    }
  }

  const int index_;
  const std::function<void()> prepare_;
  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
  std::mutex preparing_;
  std::atomic<bool> prepared_{false};
  // Constant once prepared.
  bool packs_ = false;
  cudaStream_t to_host_ = nullptr;
  cudaStream_t from_host_ = nullptr;
};

}  // namespace

void register_host_memory(void* memory, size_t size) {
  // Portable: for all devices of the process, not the current one alone. Mapped: kernels write
  // there, too.
  check(cudaHostRegister(memory, size, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister");
}

void unregister_host_memory(void* memory) noexcept { ignore(cudaHostUnregister(memory)); }

std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare) {
  return std::make_shared<CudaDevice>(index, std::move(prepare));
}

}  // namespace pyckpt
