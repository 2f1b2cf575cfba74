#include "fake_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "fake_cuda_world.h"
#include "pack.h"
#include "support.h"

namespace pyckpt::test {

using namespace fake;

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
  StreamState* const state = find_alive(w, stream, "enqueue");
  if (state->capturing) return;
  Operation operation;
  operation.work = std::move(work);
  queue(w, state, std::move(operation));
}

void FakeCuda::begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const state = find(w, stream);
  state->capturing = true;
  state->invalidated = false;
  state->capture_mode = mode;
  state->captured_by = std::this_thread::get_id();
}

cudaError_t FakeCuda::end_capture(cudaStream_t stream) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  StreamState* const state = find(w, stream);
  state->capturing = false;
  return std::exchange(state->invalidated, false) ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
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
  return copies_in(*find(w, stream));
}

bool FakeCuda::queued(cudaStream_t stream, size_t copies) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  return w.changed.wait_for(lock, std::chrono::seconds(hang_seconds()),
                            [&] { return copies_in(*find(w, stream)) >= copies; });
}

void FakeCuda::hold_registration(std::shared_future<void> until) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.registration_gate = std::move(until);
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

std::vector<std::pair<const std::byte*, size_t>> FakeCuda::registrations() const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  std::vector<std::pair<const std::byte*, size_t>> all;
  for (const auto& [data, registration] : w.registrations)
    all.emplace_back(data, registration.size);
  return all;
}

size_t FakeCuda::loaded(bool large) const {
  World& w = world();
  std::lock_guard lock(w.mutex);
  const void* const kernel = large ? large_pack_kernel() : small_pack_kernel();
  return static_cast<size_t>(std::count_if(w.loaded.begin(), w.loaded.end(),
                                           [&](const auto& one) { return one.first == kernel; }));
}

void FakeCuda::set_parameter_limit(size_t bytes) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.parameter_limit = bytes;
}

void FakeCuda::set_registration_limit(size_t bytes) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.registration_limit = bytes;
}

void FakeCuda::set_depth(size_t operations) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  w.depth = operations;
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
