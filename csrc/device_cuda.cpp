// The one place that talks to the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_entry.h"
#include "cuda_event.h"
#include "cuda_status.h"
#include "cuda_stream.h"
#include "device.h"
#include "error.h"
#include "mutex.h"
#include "numa.h"
#include "pack.h"

namespace pyckpt {
namespace {

using cuda::check;
using cuda::Entry;
using cuda::EventPool;
using cuda::ignore;
using cuda::is_capturing;
using cuda::OwnedStream;
using cuda::PooledEvent;

// A copy by itself costs a call of the driver, and between two a copy engine rests for a
// microsecond or two. Of the 40 that 2 MiB take over a bus of 50 GB/s that is little, of the 5 for
// 256 KiB a third. What is larger is left to it, since the kernel takes multiprocessors, if few,
// from the program. (Reckoned from what is known of such buses; benchmarks/gpu.py measures it on a
// GPU.)
constexpr size_t kPackMax = 2 << 20;

// Points in queues that are made before they are needed: about as many as a save has tickets
// (device_copies.h), whatever it copies.
constexpr size_t kEventsAtFirst = 64;

class CudaTicket : public Ticket {
 public:
  CudaTicket(int index, std::shared_ptr<EventPool> pool) : index_(index), event_(std::move(pool)) {}

  void record(cudaStream_t stream) {
    check(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

  void wait() override {
    try {
      synchronize();
    } catch (const CudaError&) {
      // The wait may have failed while the copies are under way, and the caller is about to give
      // their memory to others. A device that is lost says so again at once.
      try {
        synchronize();
      } catch (const CudaError&) {
      }
      throw;
    }
  }

  cudaEvent_t event() const { return event_.get(); }

 private:
  void synchronize() {
    const Entry entry(index_);
    check(cudaEventSynchronize(event_.get()), "cudaEventSynchronize");
  }

  const int index_;
  const PooledEvent event_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int index, std::function<void()> prepare)
      : index_(index),
        prepare_(std::move(prepare)),
        events_(std::make_shared<EventPool>(index)),
        to_host_(index),
        from_host_(index) {}
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

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
    return copy(transfers, cudaMemcpyDeviceToHost, to_host_.get());
  }

  std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) override {
    const Entry entry(index_);
    make_queues();
    return copy(transfers, cudaMemcpyHostToDevice, from_host_.get());
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
    check(cudaStreamWaitEvent(to_host_.get(), event.get(), 0), "cudaStreamWaitEvent");
    check(cudaStreamWaitEvent(from_host_.get(), event.get(), 0), "cudaStreamWaitEvent");
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
    return to_host_.get();
  }

 private:
  // Within an Entry.
  void make_queues() {
    if (prepared_.load(std::memory_order_acquire)) return;
    // Not std::call_once: where its function throws, as this may, other threads hang with some
    // C libraries and sanitizers.
    const Lock lock(preparing_);
    if (prepared_.load(std::memory_order_relaxed)) return;
    prepare_();
    int same_addresses = 0;
    check(cudaDeviceGetAttribute(&same_addresses, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                 index_),
          "cudaDeviceGetAttribute");
    packs_ = same_addresses != 0;
    // The first may be there from an attempt at which the second failed.
    to_host_.make();
    from_host_.make();
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
  Mutex preparing_;
  std::atomic<bool> prepared_{false};
  std::atomic<size_t> pack_capacity_{kPackTransfers};
  // Constant once prepared.
  bool packs_ = false;
  OwnedStream to_host_;
  OwnedStream from_host_;
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
  cuda::enter_or_ignore(device, [&] { ignore(cudaHostUnregister(memory)); });
}

void unregister_host_memory_after(int device, Stream stream, void* memory) noexcept {
  cuda::enter_or_ignore(device, [&] {
    ignore(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    ignore(cudaHostUnregister(memory));
  });
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
