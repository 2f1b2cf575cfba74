// The one place that talks to the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "error.h"
#include "numa.h"
#include "pack.h"

namespace pyckpt {
namespace {

// A copy by itself costs a call of the driver, and between two a copy engine rests for a
// microsecond or two. Of the 40 that 2 MiB take over a bus of 50 GB/s that is little, of the 5 for
// 256 KiB a third. What is larger is left to it, since the kernel takes multiprocessors, if few,
// from the program. (Reckoned from what is known of such buses; benchmarks/gpu.py measures it on a
// GPU.)
constexpr size_t kPackMax = 2 << 20;

// Points in queues that are made before they are needed: of a save that copies 1 GiB.
constexpr size_t kEventsAtFirst = 64;

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

// What each use of CUDA begins with. The device is made the thread's current one: a thread that has
// none would make a context on device 0. And while this lives, the thread may make calls that CUDA
// else refuses while any thread captures a graph in the global mode, torch's default: waiting for
// an event, registering memory, loading a kernel. Refused, each of them also ends that capture with
// an error. They are safe: nothing that we do is to become part of a graph, nor waits for one.
class Entry {
 public:
  explicit Entry(int index) {
    check(cudaSetDevice(index), "cudaSetDevice");
    check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() { ignore(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
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

// The events of one device, used again and again: making one takes a lock of the driver.
class EventPool {
 public:
  explicit EventPool(int index) : index_(index) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool() {
    if (free_.empty()) return;
    enter_or_ignore(index_, [this] {
      for (cudaEvent_t event : free_) ignore(cudaEventDestroy(event));
    });
  }

  // Within an Entry.
  cudaEvent_t take() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    return make();
  }

  void give_back(cudaEvent_t event) noexcept {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

  // Makes sure that so many are free. As `take`, within an Entry.
  void fill(size_t count) {
    std::lock_guard lock(mutex_);
    free_.reserve(count);
    while (free_.size() < count) free_.push_back(make());
  }

 private:
  static cudaEvent_t make() {
    cudaEvent_t event;
    // Whoever waits sleeps, and leaves the processor to the program.
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreateWithFlags");
    return event;
  }

  const int index_;
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
    const Entry entry(index_);
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
      : index_(index), prepare_(std::move(prepare)), events_(std::make_shared<EventPool>(index)) {}
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override {
    if (to_host_ == nullptr) return;
    enter_or_ignore(index_, [this] {
      for (const cudaStream_t stream : {to_host_, from_host_}) {
        if (stream != nullptr) ignore(cudaStreamDestroy(stream));
      }
    });
  }

  int index() const override { return index_; }

  bool is_ready() const override { return prepared_.load(std::memory_order_acquire); }

  void prepare() override {
    const Entry entry(index_);
    make_queues();
    events_->fill(kEventsAtFirst);
    if (!packs_) return;
    check(load_pack(kPackTransfersSmall), "loading the kernel that packs small copies");
    // Where it cannot be had, a launch finds that out and does with the small one.
    ignore(load_pack(kPackTransfers));
  }

  std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>& transfers) override {
    const Entry entry(index_);
    make_queues();
    return copy(transfers, cudaMemcpyDeviceToHost, to_host_);
  }

  std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) override {
    const Entry entry(index_);
    make_queues();
    return copy(transfers, cudaMemcpyHostToDevice, from_host_);
  }

  void follow(Stream stream) override {
    const Entry entry(index_);
    make_queues();
    const auto program = static_cast<cudaStream_t>(stream);
    if (is_capturing(program)) {
      throw CudaError(
          "the current stream is capturing a CUDA graph, so that the state is not there to be "
          "copied: save or load before the capture, or after it");
    }
    const PooledEvent event(events_);
    check(cudaEventRecord(event.get(), program), "cudaEventRecord");
    check(cudaStreamWaitEvent(to_host_, event.get(), 0), "cudaStreamWaitEvent");
    check(cudaStreamWaitEvent(from_host_, event.get(), 0), "cudaStreamWaitEvent");
  }

  void hold(Stream stream, const Ticket& ticket) override {
    const Entry entry(index_);
    const auto program = static_cast<cudaStream_t>(stream);
    // A graph cannot wait for what is outside of it: CUDA would end the capture with an error.
    if (is_capturing(program)) return;
    const auto& copies = static_cast<const CudaTicket&>(ticket);
    check(cudaStreamWaitEvent(program, copies.event(), 0), "cudaStreamWaitEvent");
  }

  Stream to_host() override {
    const Entry entry(index_);
    make_queues();
    return to_host_;
  }

 private:
  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    return capture != cudaStreamCaptureStatusNone;
  }

  // Within an Entry, whose device stays the thread's current one: setting back device 0 would make
  // a context there, in each process of a node.
  void make_queues() {
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
      if (transfer.size == 0) continue;
      if (packs && transfer.size <= kPackChunk) {
        // May straddle two registrations: what the kernel writes at a time does not.
        small.push_back(transfer);
      } else if (packs && transfer.size <= kPackMax) {
        cut(transfer, transfer.to, kPackChunk, &small);
      } else {
        std::vector<Transfer> pieces;
        const std::byte* const host = kind == cudaMemcpyDeviceToHost ? transfer.to : transfer.from;
        cut(transfer, host, kRegistrationPiece, &pieces);
        for (const Transfer& piece : pieces) {
          check(cudaMemcpyAsync(piece.to, piece.from, piece.size, kind, stream), "cudaMemcpyAsync");
        }
      }
    }
    for (size_t i = 0; i < small.size();) {
      const size_t count = std::min(pack_capacity_.load(), small.size() - i);
      const cudaError_t status = launch_pack(small.data() + i, count, stream);
      if (count > kPackTransfersSmall && is_refused(status)) {
        cudaGetLastError();
        pack_capacity_ = kPackTransfersSmall;
        continue;
      }
      check(status, "the kernel that packs small copies");
      i += count;
    }
  }

  // Appends the transfer in pieces that end where the host's address is a multiple of `piece`.
  static void cut(const Transfer& transfer, const std::byte* host, size_t piece,
                  std::vector<Transfer>* pieces) {
    for (size_t at = 0; at < transfer.size;) {
      const size_t until = piece - (reinterpret_cast<uintptr_t>(host) + at) % piece;
      const size_t size = std::min(until, transfer.size - at);
      pieces->push_back({transfer.to + at, transfer.from + at, size});
      at += size;
    }
  }

  // What drivers say that do not take as many parameters.
  static bool is_refused(cudaError_t status) {
    return status == cudaErrorInvalidValue || status == cudaErrorNotSupported ||
           status == cudaErrorInvalidKernelImage || status == cudaErrorLaunchOutOfResources;
  }

  const int index_;
  const std::function<void()> prepare_;
  const std::shared_ptr<EventPool> events_;
  std::mutex preparing_;
  std::atomic<bool> prepared_{false};
  std::atomic<size_t> pack_capacity_{kPackTransfers};
  // Constant once prepared.
  bool packs_ = false;
  cudaStream_t to_host_ = nullptr;
  cudaStream_t from_host_ = nullptr;
};

}  // namespace

void register_host_memory(int device, void* memory, size_t size) {
  const Entry entry(device);
  // Portable: for all devices of the process, not the current one alone. Mapped: kernels write
  // there, too.
  check(cudaHostRegister(memory, size, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister");
}

void unregister_host_memory(int device, void* memory) noexcept {
  enter_or_ignore(device, [&] { ignore(cudaHostUnregister(memory)); });
}

int host_node(int device) {
  const Entry entry(device);
  char address[32] = "";
  ignore(cudaDeviceGetPCIBusId(address, sizeof(address), device));
  std::string name = address;
  // The system writes its letters small, CUDA does not say how it does.
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return node_of_pci_device(name);
}

std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare) {
  return std::make_shared<CudaDevice>(index, std::move(prepare));
}

}  // namespace pyckpt
