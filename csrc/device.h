// Memory that the host cannot read by itself.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace pyckpt {

// A queue of work of a device, in order: a cudaStream_t.
using Stream = void*;

// Bytes to be copied between device and host.
struct Transfer {
  std::byte* to;
  const std::byte* from;
  size_t size;
};

// A point in a device's queue of copies. Safe to use from any thread.
class Ticket {
 public:
  virtual ~Ticket() = default;

  // Waits, without spinning, until the device is there. Throws CudaError.
  virtual void wait() = 0;
};

// One accelerator, and queues on it for copies, one in each direction, that run apart from the
// program's own work. Nothing here waits for the device but `Ticket::wait`.
//
// Safe to call from any thread. Makes the device the calling thread's current one and leaves it so:
// a thread that is not an engine's guards its own. All throw CudaError.
class Device {
 public:
  virtual ~Device() = default;

  virtual int index() const = 0;

  // Queues copies, in order. Memory on the host must be registered. Many small ones leave in one
  // launch.
  virtual std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>& transfers) = 0;
  virtual std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) = 0;

  // Copies queued from now on, in both directions, wait for what `stream` has been given so far.
  virtual void follow(Stream stream) = 0;

  // What `stream` is given from now on waits for the copies before the ticket.
  virtual void hold(Stream stream, const Ticket& ticket) = 0;

  // The queue that copies to the host.
  virtual Stream to_host() = 0;
};

#ifdef PYCKPT_CUDA
// Page-locks host memory, so that devices reach it by DMA, and lets it go again.
void register_host_memory(void* memory, size_t size);
void unregister_host_memory(void* memory) noexcept;

// The CUDA device of that index. Its streams are made when they are first used; before that it
// calls `prepare`.
std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare);
#endif

}  // namespace pyckpt
