// A CUDA runtime without a GPU, linked in place of the real one: the functions that csrc calls,
// with their meaning in every order that the real one allows.
//
// A stream is a queue of operations and a thread that runs them one after another. An event is the
// place in a queue where it was last recorded; who waits for it waits for the record that was there
// at the call. "Device memory" is host memory that the fake handed out. Streams run when they can,
// so that what keeps a copy from running too early, or a program from overwriting too early, is
// the engine's waits alone: a test holds one stream, lets the others run as far as they get
// (`settle`), and looks.
//
// What CUDA refuses the fake refuses: while a graph is captured, all calls of which it is not known
// that they are safe, in the modes that prohibit them, and the capture is lost as it would be; a
// wait of a captured stream for what is outside; more registered memory than there may be; kernels
// of more parameters than a driver takes. What CUDA would let pass, or crash at, and what ought not
// to be, it writes down for `finish`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pyckpt::test {

// The machine that the runtime finds while this lives. One at a time; all that uses CUDA must be
// gone before it goes.
class FakeCuda {
 public:
  explicit FakeCuda(int devices = 1);
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;
  ~FakeCuda();

  // Memory of a device, zeroed. Freed at the end, or before: not while a queued copy touches it.
  std::byte* allocate(int device, size_t size);
  void free(std::byte* memory);

  // A stream of the program. As torch's, it does not wait for the legacy default stream.
  cudaStream_t make_stream(int device);
  // The legacy default stream is nullptr of the calling thread's device; its name from anywhere.
  cudaStream_t default_stream(int device);
  // The program's own work.
  void enqueue(cudaStream_t stream, std::function<void()> work);
  // The calling thread captures what the stream is given, until it ends the capture: nothing of it
  // runs. `end_capture` returns what cudaStreamEndCapture would.
  void begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal);
  cudaError_t end_capture(cudaStream_t stream);

  // Streams that are there, in the order they were made, without the program's.
  std::vector<cudaStream_t> engine_streams() const;

  // Nothing of the stream runs until it is let go on.
  void hold(cudaStream_t stream);
  void release(cudaStream_t stream);
  // Lets one operation of a held stream run, and returns when it has.
  void step(cudaStream_t stream);
  void release_all();
  // From now on one operation runs at a time, of a stream that is drawn: another order every time.
  void shuffle(unsigned seed);

  // Waits until no stream can go on: all are empty, held, or wait for one that is.
  void settle();
  // Waits until so many threads wait for the device. False if that does not come about.
  bool blocked(size_t threads);

  // Waits until so many copies are queued on a stream and not over. False if that does not come
  // about.
  bool queued(cudaStream_t stream, size_t copies);
  // The next registration waits until the future is there; `blocked` counts its thread.
  void hold_registration(std::shared_future<void> until);

  // Copies queued and not begun, those of one launch counted each.
  size_t pending_copies(cudaStream_t stream) const;
  // How many copies each launch of the packing kernel made.
  std::vector<size_t> launches() const;
  // How often a function was called.
  size_t calls(const std::string& function) const;
  // How often the thread that made this, the program's, was made to wait for a device.
  size_t program_waits() const;
  // Devices of which this process has a context. As with CUDA, almost any call of a thread makes
  // one on the thread's device, which is number 0 until the thread has set another.
  std::set<int> contexts() const;
  // Of how many devices the kernel for so many transfers was loaded: at its first launch, or when
  // somebody asked for its attributes.
  size_t loaded(bool large) const;

  size_t live_streams() const;  // without the program's
  size_t live_events() const;
  size_t live_registrations() const;

  // The n-th call from now on of a function fails, n = 1, 2, ..., and does nothing.
  void fail(const std::string& function, size_t n, cudaError_t error = cudaErrorUnknown);
  // Fails no more. Returns whether one did.
  bool heal();
  // A sticky error: what is queued on the device is gone, all calls fail from now on.
  void lose(int device, cudaError_t error = cudaErrorLaunchFailure);
  // What host memory may not be written to by kernels says.
  void set_same_addresses(bool same);
  // How many bytes of parameters a kernel may have; launches with more are refused.
  void set_parameter_limit(size_t bytes);
  // How many bytes of host memory may be registered at a time.
  void set_registration_limit(size_t bytes);
  // How many operations of a stream may be pending, those of `enqueue` among them: a thread that
  // gives it more waits until the stream has done some; `blocked` counts it. CUDA's number, of
  // about a thousand, is not documented, nor whether calls of other threads then wait, too. Here
  // they do not.
  void set_depth(size_t operations);
  // Each registration so far, in the order of their addresses: begin and bytes.
  std::vector<std::pair<const std::byte*, size_t>> registrations() const;

  // Lets everything run. Empty where the runtime was used as it may be, and all was given back;
  // else what was wrong, a line each.
  std::string finish();
};

}  // namespace pyckpt::test
