#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "device.h"
#include "pack.h"
#include "support.h"

namespace pyckpt::test {
namespace {

// Set once what stands before it in its stream is over.
struct Mark {
  bool reached = false;
};

struct Range {
  const std::byte* data;
  size_t size;
};

bool overlap(const Range& a, const Range& b) {
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
  bool capturing = false;
  size_t steps = 0;  // that it may make although it is held
  std::deque<Operation> queue;
  std::shared_ptr<Mark> last = nullptr;
  std::thread thread;
};

struct EventState {
  int device = 0;
  unsigned flags = 0;
  bool alive = true;
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
  bool stopping = false;
  size_t waiting = 0;  // threads
  size_t program_waits = 0;
  const std::thread::id program = std::this_thread::get_id();
  bool shuffled = false;
  std::mt19937 random;
  StreamState* drawn = nullptr;
};

// Set by FakeCuda alone, while no other thread is in here.
std::atomic<World*> the_world{nullptr};
std::atomic<int> world_number{0};

// As the runtime's: device 0 for each thread that did not say otherwise.
struct ThreadState {
  int world = -1;
  int device = 0;
  cudaError_t last_error = cudaSuccess;
};

ThreadState& thread_state() {
  thread_local ThreadState state;
  if (state.world != world_number.load()) state = {world_number.load(), 0, cudaSuccess};
  return state;
}

World& world() {
  World* const now = the_world.load();
  if (now == nullptr) throw std::logic_error("CUDA is used where no FakeCuda is");
  return *now;
}

void misuse(World& w, const std::string& what) { w.misuses.push_back(what); }

// From here on with the world's mutex held.

StreamState* find(World& w, cudaStream_t handle) {
  if (handle == nullptr) return w.legacy.at(static_cast<size_t>(thread_state().device));
  for (const auto& stream : w.streams) {
    if (reinterpret_cast<cudaStream_t>(stream.get()) == handle) return stream.get();
  }
  return nullptr;
}

EventState* find(World& w, cudaEvent_t handle) {
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

bool ready(const Operation& operation) {
  return std::all_of(operation.after.begin(), operation.after.end(),
                     [](const auto& mark) { return mark->reached; });
}

bool can_run(const StreamState& stream) {
  return !stream.queue.empty() && !stream.running && (!stream.held || stream.steps > 0) &&
         ready(stream.queue.front());
}

bool anything_runs(const World& w) {
  return std::any_of(w.streams.begin(), w.streams.end(),
                     [](const auto& stream) { return stream->running; });
}

bool settled(const World& w) {
  return !anything_runs(w) && std::none_of(w.streams.begin(), w.streams.end(),
                                           [](const auto& stream) { return can_run(*stream); });
}

// Where one operation runs at a time, draws whose turn it is.
bool has_turn(World& w, StreamState* stream) {
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

void run_stream(World& w, StreamState* stream) {
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

StreamState* add_stream(World& w, int device, bool blocking, bool program) {
  w.streams.push_back(std::make_unique<StreamState>());
  StreamState* const stream = w.streams.back().get();
  stream->device = device;
  stream->blocking = blocking;
  stream->program = program;
  stream->thread = std::thread([&w, stream] { run_stream(w, stream); });
  return stream;
}

void queue(World& w, StreamState* stream, Operation operation) {
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

const Registration* registration_of(const World& w, const Range& range) {
  auto after = w.registrations.upper_bound(range.data);
  if (after == w.registrations.begin()) return nullptr;
  --after;
  return range.data + range.size <= after->first + after->second.size ? &after->second : nullptr;
}

const Allocation* allocation_of(const World& w, const Range& range) {
  auto after = w.allocations.upper_bound(range.data);
  if (after == w.allocations.begin()) return nullptr;
  --after;
  return range.data + range.size <= after->first + after->second.size ? &after->second : nullptr;
}

bool is_touched(const World& w, const Range& range) {
  for (const auto& stream : w.streams) {
    for (const Operation& operation : stream->queue) {
      for (const Range& touched : operation.touches) {
        if (overlap(touched, range)) return true;
      }
    }
  }
  return false;
}

cudaError_t failed(cudaError_t error) {
  thread_state().last_error = error;
  return error;
}

// What all functions that can fail begin with; `device` is the one that the call is about.
cudaError_t enter(World& w, const char* function, int device, bool makes_context = true) {
  ++w.calls[function];
  if (makes_context) w.contexts.insert(device);
  if (w.injection.function == function && w.injection.left > 0 && --w.injection.left == 0) {
    w.injection.fired = true;
    return failed(w.injection.error);
  }
  const cudaError_t lost = w.lost.at(static_cast<size_t>(device));
  return lost == cudaSuccess ? cudaSuccess : failed(lost);
}

// The calling thread waits for a device.
cudaError_t wait_for(World& w, std::unique_lock<std::mutex>* lock,
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

// Checks one copy by DMA, from or to host memory that must be registered with all of `flags`.
void check_copy(World& w, const char* function, const Range& host, const Range& device,
                unsigned flags) {
  const Registration* const registration = registration_of(w, host);
  if (registration == nullptr) {
    misuse(w, std::string(function) + " with host memory that is not registered");
  } else if ((registration->flags & flags) != flags) {
    misuse(w, std::string(function) + " with host memory that is not registered for that");
  }
  if (allocation_of(w, device) == nullptr) {
    misuse(w, std::string(function) + " with memory that is no device's");
  }
}

}  // namespace

FakeCuda::FakeCuda(int devices) {
  auto* const made = new World(devices);
  ++world_number;
  if (the_world.exchange(made) != nullptr) throw std::logic_error("there is a FakeCuda already");
  std::lock_guard lock(made->mutex);
  for (int device = 0; device < devices; ++device) {
    StreamState* const stream = add_stream(*made, device, false, true);
    stream->legacy = true;
    made->legacy.push_back(stream);
  }
}

FakeCuda::~FakeCuda() {
  World* const w = the_world.exchange(nullptr);
  {
    std::lock_guard lock(w->mutex);
    w->stopping = true;
    w->changed.notify_all();
  }
  for (const auto& stream : w->streams) {
    if (stream->thread.joinable()) stream->thread.join();
  }
  delete w;
}

std::byte* FakeCuda::allocate(int device, size_t size) {
  World& w = world();
  constexpr size_t kAlignment = 256;  // cudaMalloc's
  const size_t rounded = (std::max<size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  std::memset(memory, 0, rounded);
  std::lock_guard lock(w.mutex);
  w.allocations[memory] = {size, device, std::shared_ptr<std::byte>(memory, std::free)};
  return memory;
}

void FakeCuda::free(std::byte* memory) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (is_touched(w, {memory, w.allocations.at(memory).size})) {
    misuse(w, "device memory was freed while a queued copy touches it");
    return;
  }
  w.allocations.erase(memory);
}

cudaStream_t FakeCuda::make_stream(int device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return reinterpret_cast<cudaStream_t>(add_stream(w, device, false, true));
}

cudaStream_t FakeCuda::default_stream(int device) {
  return reinterpret_cast<cudaStream_t>(world().legacy.at(static_cast<size_t>(device)));
}

void FakeCuda::enqueue(cudaStream_t stream, std::function<void()> work) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  Operation operation;
  operation.work = std::move(work);
  queue(w, find_alive(w, stream, "enqueue"), std::move(operation));
}

void FakeCuda::capture(cudaStream_t stream, bool is_capturing) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  find(w, stream)->capturing = is_capturing;
}

std::vector<cudaStream_t> FakeCuda::engine_streams() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  std::vector<cudaStream_t> streams;
  for (const auto& stream : w.streams) {
    if (stream->alive && !stream->program) {
      streams.push_back(reinterpret_cast<cudaStream_t>(stream.get()));
    }
  }
  return streams;
}

void FakeCuda::hold(cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const state = find(w, stream);
  state->held = true;
  w.changed.wait(lock, [&] { return !state->running; });
}

void FakeCuda::release(cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const state = find(w, stream);
  state->held = false;
  state->steps = 0;
  w.changed.notify_all();
}

void FakeCuda::step(cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  StreamState* const state = find(w, stream);
  ++state->steps;
  w.changed.notify_all();
  w.changed.wait(lock, [&] { return state->steps == 0 && !state->running; });
}

void FakeCuda::release_all() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  for (const auto& stream : w.streams) stream->held = false;
  w.changed.notify_all();
}

void FakeCuda::shuffle(unsigned seed) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.shuffled = true;
  w.random.seed(seed);
}

void FakeCuda::settle() {
  World& w = world();
  std::unique_lock lock(w.mutex);
  w.changed.wait(lock, [&] { return settled(w); });
}

bool FakeCuda::blocked(size_t threads) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  return w.changed.wait_for(lock, std::chrono::seconds(hang_seconds()),
                            [&] { return w.waiting >= threads; });
}

size_t FakeCuda::pending_copies(cudaStream_t stream) const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  size_t copies = 0;
  for (const Operation& operation : find(w, stream)->queue) copies += operation.copies;
  return copies;
}

std::vector<size_t> FakeCuda::launches() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.launches;
}

size_t FakeCuda::calls(const std::string& function) const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.calls[function];
}

size_t FakeCuda::program_waits() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.program_waits;
}

std::set<int> FakeCuda::contexts() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.contexts;
}

size_t FakeCuda::live_streams() const { return engine_streams().size(); }

size_t FakeCuda::live_events() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return static_cast<size_t>(std::count_if(w.events.begin(), w.events.end(),
                                           [](const auto& event) { return event->alive; }));
}

size_t FakeCuda::live_registrations() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.registrations.size();
}

void FakeCuda::fail(const std::string& function, size_t n, cudaError_t error) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.injection = {function, n, error, false};
}

bool FakeCuda::heal() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return std::exchange(w.injection, {}).fired;
}

void FakeCuda::lose(int device, cudaError_t error) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  // What runs is over first: a device that is lost writes no more.
  w.changed.wait(lock, [&] { return !anything_runs(w); });
  w.lost.at(static_cast<size_t>(device)) = error;
  for (const auto& stream : w.streams) {
    if (stream->device != device) continue;
    // Others that wait for it would otherwise hang; what they do then is of no use to anyone.
    for (const Operation& operation : stream->queue) operation.mark->reached = true;
    stream->queue.clear();
  }
  w.changed.notify_all();
}

void FakeCuda::set_same_addresses(bool same) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.same_addresses = same;
}

std::string FakeCuda::finish() {
  release_all();
  settle();
  World& w = world();
  std::lock_guard lock(w.mutex);
  const auto count = [](const auto& all) {
    return std::count_if(all.begin(), all.end(), [](const auto& one) { return one->alive; });
  };
  const auto streams = std::count_if(w.streams.begin(), w.streams.end(), [](const auto& stream) {
    return stream->alive && !stream->program;
  });
  if (streams != 0) misuse(w, std::to_string(streams) + " streams were not destroyed");
  if (count(w.events) != 0) {
    misuse(w, std::to_string(count(w.events)) + " events were not destroyed");
  }
  if (!w.registrations.empty()) {
    misuse(w, std::to_string(w.registrations.size()) + " registrations were not undone");
  }
  if (thread_state().last_error != cudaSuccess) {
    misuse(w, "an error was left for the program's next cudaGetLastError");
  }
  std::string lines;
  for (const std::string& line : w.misuses) lines += line + "\n";
  return lines;
}

}  // namespace pyckpt::test

// The runtime's functions. Parameters have the names that the runtime's documentation gives them.

using namespace pyckpt::test;

extern "C" {

cudaError_t cudaSetDevice(int device) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (device < 0 || static_cast<size_t>(device) >= w.lost.size()) {
    return failed(cudaErrorInvalidDevice);
  }
  const cudaError_t error = enter(w, __func__, device);
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
  if (const cudaError_t error = enter(w, __func__, device); error != cudaSuccess) return error;
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
  const cudaError_t error = enter(w, __func__, state->device, false);
  state->alive = false;
  w.changed.notify_all();
  return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const StreamState* const state = find_alive(w, stream, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const cudaError_t error = enter(w, __func__, state->device);
  if (error == cudaSuccess) {
    *status = state->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  }
  return error;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const state = find_alive(w, stream, __func__);
  const EventState* const of = find_alive(w, event, __func__);
  if (state == nullptr || of == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const cudaError_t error = enter(w, __func__, state->device);
  if (error != cudaSuccess || !of->recorded) return error;
  Operation operation;
  operation.after.push_back(of->recorded);
  queue(w, state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  const StreamState* const state = find_alive(w, stream, __func__);
  if (state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter(w, __func__, state->device); error != cudaSuccess) {
    return error;
  }
  return wait_for(w, &lock, state->last, state->device);
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
  const cudaError_t error = enter(w, __func__, state->device, false);
  state->alive = false;
  return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const on = find_alive(w, stream, __func__);
  EventState* const state = find_alive(w, event, __func__);
  if (on == nullptr || state == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter(w, __func__, on->device); error != cudaSuccess) return error;
  if (on->device != state->device) {
    misuse(w, "an event of one device was recorded on a stream of another");
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (on->capturing) misuse(w, "an event was recorded on a stream that captures a graph");
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
  // Whatever the event's device, the call initializes the thread's.
  w.contexts.insert(thread_state().device);
  if (const cudaError_t error = enter(w, __func__, state->device); error != cudaSuccess) {
    return error;
  }
  if ((state->flags & cudaEventBlockingSync) == 0) {
    misuse(w, "cudaEventSynchronize spins: the event was made without cudaEventBlockingSync");
  }
  return wait_for(w, &lock, state->recorded, state->device);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const on = find_alive(w, stream, __func__);
  if (on == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter(w, __func__, on->device); error != cudaSuccess) return error;
  const Range target{static_cast<const std::byte*>(to), count};
  const Range source{static_cast<const std::byte*>(from), count};
  if (kind == cudaMemcpyDeviceToHost) {
    check_copy(w, __func__, target, source, 0);
  } else if (kind == cudaMemcpyHostToDevice) {
    check_copy(w, __func__, source, target, 0);
  } else {
    misuse(w, "cudaMemcpyAsync of a kind that the fake does not know");
  }
  Operation operation;
  operation.work = [=] { std::memcpy(to, from, count); };
  operation.touches = {target, source};
  operation.copies = 1;
  queue(w, on, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t size, unsigned flags) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const int device = thread_state().device;
  if (const cudaError_t error = enter(w, __func__, device); error != cudaSuccess) return error;
  const Range range{static_cast<const std::byte*>(memory), size};
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
  if (is_touched(w, {found->first, found->second.size})) {
    misuse(w, "host memory was unregistered while a queued copy touches it");
  }
  w.registrations.erase(found);
  return enter(w, __func__, thread_state().device, false);
}

cudaError_t cudaGetLastError() {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const cudaError_t error = std::exchange(thread_state().last_error, cudaSuccess);
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
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
    default:
      return "unknown error";
  }
}

}  // extern "C"

namespace pyckpt {

// The kernel of pack.cu, by the host.
cudaError_t launch_pack(const Transfer* transfers, size_t count, cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const on = find_alive(w, stream, __func__);
  if (on == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = enter(w, __func__, on->device); error != cudaSuccess) return error;
  if (on->device != thread_state().device) {
    misuse(w, "a kernel was launched on a stream of another device than the current one");
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (count == 0 || count > kPackTransfers) misuse(w, "a kernel of too many copies, or of none");
  if (!w.same_addresses) misuse(w, "a kernel was given host addresses that it cannot use");
  Operation operation;
  for (const Transfer* transfer = transfers; transfer != transfers + count; ++transfer) {
    const Range target{transfer->to, transfer->size};
    const Range source{transfer->from, transfer->size};
    check_copy(w, __func__, target, source, cudaHostRegisterMapped);
    operation.touches.push_back(target);
    operation.touches.push_back(source);
  }
  operation.copies = count;
  operation.work = [all = std::vector<Transfer>(transfers, transfers + count)] {
    for (const Transfer& transfer : all) std::memcpy(transfer.to, transfer.from, transfer.size);
  };
  w.launches.push_back(count);
  queue(w, on, std::move(operation));
  return cudaSuccess;
}

}  // namespace pyckpt
