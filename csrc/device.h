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
// program's own work. Nothing here waits for the device but `Ticket::wait`, and whatever gives work
// to a stream that has about a thousand entries pending: there CUDA's driver makes the thread wait
// until the device has done some (CUDA does not document how many). So the caller holds no lock,
// nor the GIL, that others need.
//
// Safe to call from any thread, also while some thread captures a graph, which nothing here ends or
// becomes a part of. Makes the device the calling thread's current one and leaves it so: a thread
// that is not an engine's guards its own. All throw CudaError.
class Device {
 public:
  virtual ~Device() = default;

  virtual int index() const = 0;

  // Whether the next call has to make nothing first, which would take long.
  virtual bool is_ready() const = 0;
  // Makes now what the first copies would make: queues, points in them, registered slots, a loaded
  // kernel.
  virtual void prepare() = 0;

  // Queues copies, in order. Memory on the host must be registered. Many small ones leave in one
  // launch.
  virtual std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>& transfers) = 0;
  virtual std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) = 0;

  // Copies queued from now on, in both directions, wait for what `stream` has been given so far.
  // A stream that captures a graph is an error: what it was given has not happened.
  virtual void follow(Stream stream) = 0;

  // What `stream` is given from now on waits for the copies before the ticket. Does nothing to a
  // stream that captures a graph: what that is given does not happen now. When the graph is
  // replayed, the program must say so itself.
  virtual void hold(Stream stream, const Ticket& ticket) = 0;

  // The queue that copies to the host.
  virtual Stream to_host() = 0;
};

// In place of a device's number: of none.
constexpr int kNoDevice = -1;

#ifdef PYCKPT_CUDA
// Host memory is registered in pieces that end where an address is a multiple of that: registering
// takes locks of the driver and of the process's memory, for milliseconds a piece, and between two
// pieces others get them. CUDA promises copies by cudaMemcpyAsync within one registration only, so
// a Device cuts its copies at the same addresses, which takes no knowledge of who registered what.
constexpr size_t kRegistrationPiece = 64 << 20;

// Page-locks host memory, so that all devices reach it by DMA, and lets it go again. `device` is
// one that the process uses already: CUDA would choose device 0, and make a context there.
void register_host_memory(int device, void* memory, size_t size);
void unregister_host_memory(int device, void* memory) noexcept;
// The same, after what a stream of the device was given so far, which may use the memory.
void unregister_host_memory_after(int device, Stream stream, void* memory) noexcept;

// The NUMA node that a device is attached to; -1 where there is but one, or nobody knows.
int host_node(int device);

// The CUDA device of that index. Its streams are made when they are first used; before that it
// calls `prepare`.
std::shared_ptr<Device> make_cuda_device(int index, std::function<void()> prepare);
#endif

}  // namespace pyckpt
