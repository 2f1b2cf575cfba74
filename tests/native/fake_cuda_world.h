// What the parts of the fake runtime share: its state, and what streams and threads do with it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace pyckpt::test::fake {

// Set once what stands before it in its stream is over.
struct Mark {
  bool reached = false;
};

struct Range {
  const std::byte* data;
  size_t size;
};

inline bool overlap(const Range& a, const Range& b) {
  return a.data < b.data + b.size && b.data < a.data + a.size;
}

struct Operation {
  std::vector<std::shared_ptr<Mark>> after;  // marks of other streams
  std::function<void()> work;
  std::vector<Range> touches;
  size_t copies = 0;
  std::shared_ptr<Mark> mark = std::make_shared<Mark>();
};

struct StreamState {
  int device = 0;
  bool legacy = false;
  bool blocking = false;  // waits for the legacy stream, which waits for it
  bool program = false;   // the test made it
  bool alive = true;
  bool held = false;
  bool running = false;
  size_t waited_for = 0;  // by threads
  // While a graph is captured:
  bool capturing = false;
  bool invalidated = false;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::thread::id captured_by = {};
  size_t steps = 0;  // that it may make although it is held
  std::deque<Operation> queue;
  std::shared_ptr<Mark> last = nullptr;
  std::thread thread;
};

struct EventState {
  int device = 0;
  unsigned flags = 0;
  bool alive = true;
  bool captured = false;  // was last recorded while a graph was captured
  std::shared_ptr<Mark> recorded = nullptr;
};

struct Registration {
  size_t size;
  unsigned flags;
};

struct Allocation {
  size_t size;
  int device;
  std::shared_ptr<std::byte> memory;
};

struct Injection {
  std::string function;
  size_t left = 0;
  cudaError_t error = cudaSuccess;
  bool fired = false;
};

struct World {
  explicit World(int devices) : lost(static_cast<size_t>(devices), cudaSuccess) {}

  std::mutex mutex;
  std::condition_variable changed;

  // All guarded by mutex. Handles that were destroyed stay, so that their use is noticed.
  std::vector<std::unique_ptr<StreamState>> streams;
  std::vector<std::unique_ptr<EventState>> events;
  std::vector<StreamState*> legacy;
  std::map<const std::byte*, Registration> registrations;
  std::map<const std::byte*, Allocation> allocations;
  std::vector<cudaError_t> lost;
  std::map<std::string, size_t> calls;
  std::vector<size_t> launches;
  std::set<int> contexts;
  std::vector<std::string> misuses;
  Injection injection;
  bool same_addresses = true;
  size_t parameter_limit = 32764;
  size_t registration_limit = SIZE_MAX;
  size_t depth = SIZE_MAX;  // of each stream's queue
  std::shared_future<void> registration_gate;
  std::set<std::pair<const void*, int>> loaded;  // kernels, on devices
  bool stopping = false;
  size_t waiting = 0;  // threads
  size_t program_waits = 0;
  const std::thread::id program = std::this_thread::get_id();
  bool shuffled = false;
  std::mt19937 random;
  StreamState* drawn = nullptr;
};

// Set by FakeCuda alone, while no other thread is in here.
inline std::atomic<World*> the_world{nullptr};
inline std::atomic<int> world_number{0};

// As the runtime's: device 0 for each thread that did not say otherwise.
struct ThreadState {
  int world = -1;
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};

inline ThreadState& thread_state() {
  thread_local ThreadState state;
  if (state.world != world_number.load()) state = {world_number.load()};
  return state;
}

inline World& world() {
  World* const now = the_world.load();
  if (now == nullptr) throw std::logic_error("CUDA is used where no FakeCuda is");
  return *now;
}

inline void misuse(World& w, const std::string& what) { w.misuses.push_back(what); }

// From here on with the world's mutex held.

inline StreamState* find(World& w, cudaStream_t handle) {
  if (handle == nullptr) return w.legacy.at(static_cast<size_t>(thread_state().device));
  for (const auto& stream : w.streams) {
    if (reinterpret_cast<cudaStream_t>(stream.get()) == handle) return stream.get();
  }
  return nullptr;
}

inline EventState* find(World& w, cudaEvent_t handle) {
  for (const auto& event : w.events) {
    if (reinterpret_cast<cudaEvent_t>(event.get()) == handle) return event.get();
  }
  return nullptr;
}

template <typename Handle>
auto* find_alive(World& w, Handle handle, const char* function) {
  auto* const found = find(w, handle);
  if (found != nullptr && found->alive) return found;
  misuse(w, std::string(function) + " of what was destroyed, or never made");
  return static_cast<decltype(found)>(nullptr);
}

inline size_t copies_in(const StreamState& stream) {
  size_t copies = 0;
  for (const Operation& operation : stream.queue) copies += operation.copies;
  return copies;
}

inline bool ready(const Operation& operation) {
  return std::all_of(operation.after.begin(), operation.after.end(),
                     [](const auto& mark) { return mark->reached; });
}

inline bool can_run(const StreamState& stream) {
  return !stream.queue.empty() && !stream.running && (!stream.held || stream.steps > 0) &&
         ready(stream.queue.front());
}

inline bool anything_runs(const World& w) {
  return std::any_of(w.streams.begin(), w.streams.end(),
                     [](const auto& stream) { return stream->running; });
}

inline bool settled(const World& w) {
  return !anything_runs(w) && std::none_of(w.streams.begin(), w.streams.end(),
                                           [](const auto& stream) { return can_run(*stream); });
}

// Where one operation runs at a time, draws whose turn it is.
inline bool has_turn(World& w, StreamState* stream) {
  if (!can_run(*stream)) return false;
  if (!w.shuffled) return true;
  if (anything_runs(w)) return false;
  if (w.drawn == nullptr || !can_run(*w.drawn)) {
    std::vector<StreamState*> all;
    for (const auto& other : w.streams) {
      if (can_run(*other)) all.push_back(other.get());
    }
    w.drawn = all[w.random() % all.size()];
    w.changed.notify_all();
  }
  return w.drawn == stream;
}

inline void run_stream(World& w, StreamState* stream) {
  std::unique_lock lock(w.mutex);
  for (;;) {
    const auto ended = [&] { return w.stopping || (!stream->alive && stream->queue.empty()); };
    w.changed.wait(lock, [&] { return ended() || has_turn(w, stream); });
    if (ended()) return;
    stream->running = true;
    if (stream->held) --stream->steps;
    const std::function<void()> work = std::move(stream->queue.front().work);
    lock.unlock();
    if (work) work();
    lock.lock();
    stream->running = false;
    if (w.drawn == stream) w.drawn = nullptr;
    stream->queue.front().mark->reached = true;
    stream->queue.pop_front();
    w.changed.notify_all();
  }
}

inline StreamState* add_stream(World& w, int device, bool blocking, bool program) {
  w.streams.push_back(std::make_unique<StreamState>());
  StreamState* const stream = w.streams.back().get();
  stream->device = device;
  stream->blocking = blocking;
  stream->program = program;
  stream->thread = std::thread([&w, stream] { run_stream(w, stream); });
  return stream;
}

inline void queue(World& w, StreamState* stream, Operation operation) {
  for (const auto& other : w.streams) {
    const bool ordered =
        other->device == stream->device && other.get() != stream &&
        ((stream->legacy && other->blocking) || (stream->blocking && other->legacy));
    if (ordered && other->last) operation.after.push_back(other->last);
  }
  stream->last = operation.mark;
  stream->queue.push_back(std::move(operation));
  w.changed.notify_all();
}

inline const Allocation* allocation_of(const World& w, const Range& range) {
  auto after = w.allocations.upper_bound(range.data);
  if (after == w.allocations.begin()) return nullptr;
  --after;
  return range.data + range.size <= after->first + after->second.size ? &after->second : nullptr;
}

inline bool is_touched(const World& w, const Range& range) {
  for (const auto& stream : w.streams) {
    for (const Operation& operation : stream->queue) {
      for (const Range& touched : operation.touches) {
        if (overlap(touched, range)) return true;
      }
    }
  }
  return false;
}

inline cudaError_t failed(cudaError_t error) {
  thread_state().last_error = error;
  return error;
}

// What all functions that can fail begin with; `device` is the one that the call is about. Whatever
// that is, the runtime makes a context on the thread's.
inline cudaError_t enter(World& w, const char* function, int device, bool of_thread = true) {
  ++w.calls[function];
  w.contexts.insert(device);
  if (of_thread) w.contexts.insert(thread_state().device);
  if (w.injection.function == function && w.injection.left > 0 && --w.injection.left == 0) {
    w.injection.fired = true;
    return failed(w.injection.error);
  }
  const cudaError_t lost = w.lost.at(static_cast<size_t>(device));
  return lost == cudaSuccess ? cudaSuccess : failed(lost);
}

// What a function begins with, too, that CUDA does not promise to be safe while a graph is
// captured: it is refused, and the captures are lost that forbid it to this thread.
inline cudaError_t enter_unsafe(World& w, const char* function, int device) {
  if (const cudaError_t error = enter(w, function, device); error != cudaSuccess) return error;
  const cudaStreamCaptureMode mode = thread_state().mode;
  bool refused = false;
  for (const auto& stream : w.streams) {
    if (!stream->capturing) continue;
    const bool own = stream->captured_by == std::this_thread::get_id() &&
                     stream->capture_mode != cudaStreamCaptureModeRelaxed &&
                     mode != cudaStreamCaptureModeRelaxed;
    const bool others =
        stream->capture_mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
    if (!own && !others) continue;
    stream->invalidated = true;
    refused = true;
  }
  return refused ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// Whether work may be given to a stream while others are captured: not to the default stream, which
// would have to wait for one that captures and is not cudaStreamNonBlocking.
inline cudaError_t enter_stream(World& w, const char* function, StreamState* stream) {
  if (const cudaError_t error = enter(w, function, stream->device); error != cudaSuccess) {
    return error;
  }
  if (stream->invalidated) return failed(cudaErrorStreamCaptureInvalidated);
  if (!stream->legacy) return cudaSuccess;
  for (const auto& other : w.streams) {
    if (!other->capturing || !other->blocking || other->device != stream->device) continue;
    other->invalidated = true;
    return failed(cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

inline bool is_mapped(const Range& range) {
  if (range.size == 0) return true;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(range.data) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(range.data) + range.size;
  std::vector<unsigned char> there((end - begin + page - 1) / page);
  return ::mincore(reinterpret_cast<void*>(begin), end - begin, there.data()) == 0 ||
         errno != ENOMEM;
}

// Does what a stream does, when its turn comes; not where the memory is not there any more.
inline std::function<void()> copying(World& w, std::vector<Range> ranges,
                                     std::function<void()> work) {
  return [&w, ranges = std::move(ranges), work = std::move(work)] {
    if (std::all_of(ranges.begin(), ranges.end(), is_mapped)) {
      work();
      return;
    }
    std::lock_guard lock(w.mutex);
    misuse(w, "memory was unmapped while a queued copy touches it");
  };
}

// The calling thread waits for a device.
inline cudaError_t wait_for(World& w, std::unique_lock<std::mutex>* lock,
                            const std::shared_ptr<Mark>& mark, int device) {
  if (std::this_thread::get_id() == w.program) ++w.program_waits;
  const auto& lost = w.lost[static_cast<size_t>(device)];
  if (mark) {
    ++w.waiting;
    w.changed.notify_all();
    w.changed.wait(*lock, [&] { return mark->reached || lost != cudaSuccess; });
    --w.waiting;
  }
  return lost == cudaSuccess ? cudaSuccess : failed(lost);
}

// Waits until the stream's queue takes one more operation. Other threads' calls go on meanwhile.
inline cudaError_t wait_for_room(World& w, std::unique_lock<std::mutex>* lock,
                                 StreamState* stream) {
  const auto& lost = w.lost[static_cast<size_t>(stream->device)];
  if (!stream->capturing && stream->queue.size() >= w.depth) {
    if (std::this_thread::get_id() == w.program) ++w.program_waits;
    ++w.waiting;
    ++stream->waited_for;
    w.changed.notify_all();
    w.changed.wait(*lock, [&] { return stream->queue.size() < w.depth || lost != cudaSuccess; });
    --stream->waited_for;
    --w.waiting;
  }
  return lost == cudaSuccess ? cudaSuccess : failed(lost);
}

// Checks one copy by DMA, from or to host memory that must be registered with all of `flags`, by
// one call, or where a kernel writes it, by several.
inline void check_copy(World& w, const char* function, Range host, const Range& device,
                       unsigned flags, bool by_kernel) {
  for (bool whole = false; !whole;) {
    auto after = w.registrations.upper_bound(host.data);
    const auto* registration = after == w.registrations.begin() ? nullptr : &*std::prev(after);
    const std::byte* const end =
        registration == nullptr ? nullptr : registration->first + registration->second.size;
    whole = host.data + host.size <= end;
    if (registration == nullptr || (!whole && (!by_kernel || end <= host.data))) {
      misuse(w, std::string(function) + " with host memory that is not registered");
      break;
    }
    if ((registration->second.flags & flags) != flags) {
      misuse(w, std::string(function) + " with host memory that is not registered for that");
    }
    if (!whole) host = {end, host.size - static_cast<size_t>(end - host.data)};
  }
  if (allocation_of(w, device) == nullptr) {
    misuse(w, std::string(function) + " with memory that is no device's");
  }
}

}  // namespace pyckpt::test::fake
