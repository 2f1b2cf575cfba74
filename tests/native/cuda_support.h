// What the tests of the CUDA path share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "fake_cuda.h"
#include "support.h"

namespace pyckpt::test {

// A machine of two devices. Whatever a test does, the runtime must have been used as it may be, and
// all be given back.
class CudaTest : public testing::Test {
 protected:
  using Programs = std::vector<std::pair<std::shared_ptr<Device>, Stream>>;

  void TearDown() override { EXPECT_EQ(cuda_.finish(), ""); }

  std::byte* on_device(int device, const std::string& bytes) {
    std::byte* const memory = cuda_.allocate(device, bytes.size());
    std::memcpy(memory, bytes.data(), bytes.size());
    return memory;
  }

  // What the program does to its memory, sooner or later.
  void write_later(cudaStream_t stream, std::byte* memory, const std::string& bytes) {
    cuda_.enqueue(stream, [=] { std::memcpy(memory, bytes.data(), bytes.size()); });
  }

  static std::string bytes_at(const std::byte* memory, size_t size) {
    return {reinterpret_cast<const char*>(memory), size};
  }

  static std::string staged_bytes(const StageJob& job, size_t index) {
    const auto& staged = job.staged().at(index);
    return staged ? bytes_at(staged->data(), staged->size()) : "found no room";
  }

  static StageSource source(const std::shared_ptr<Device>& device, const std::byte* data,
                            size_t size, bool guarded) {
    StageSource source;
    source.data = data;
    source.size = size;
    source.device = device;
    source.guarded = guarded;
    return source;
  }

  static Source device_source(const std::shared_ptr<Device>& device, const std::byte* data,
                              size_t size) {
    Source source;
    source.data = data;
    source.size = size;
    source.device = device;
    return source;
  }

  // As the program's thread does it.
  static std::shared_ptr<StageJob> stage(Engine* engine, const std::vector<StageSource>& sources,
                                         const Programs& programs) {
    StageJob::Options options;
    if (!programs.empty()) options.pin_device = programs.front().first->index();
    options.programs = programs;
    for (const auto& [device, stream] : programs) device->follow(stream);
    return engine->start_stage(sources, std::move(options));
  }

  // Slots of a page, few threads, and an arena that the tests' sources fit into.
  static EngineOptions small() { return {4096, 2, 2, 16 << 20}; }

  FakeCuda cuda_{2};
  Random random_{11};
};

// Runs on a thread of its own; what it throws comes from `get`.
template <typename Function>
std::future<void> beside(Function function) {
  return std::async(std::launch::async, std::move(function));
}

}  // namespace pyckpt::test
