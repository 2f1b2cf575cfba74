// Saves and loads while some thread captures a CUDA graph: the capture goes on, and so do they.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cuda_support.h"
#include "error.h"
#include "stage_job.h"

namespace pyckpt {
namespace {

using namespace test;

class CaptureCudaTest : public CudaTest {
 protected:
  // All that an engine does from its first copy to its end, none of which was made before.
  void use_an_engine() {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    std::vector<StageSource> sources;
    for (const size_t size : {3, 5000, 3 << 20}) {
      for (const bool guarded : {false, true}) {
        sources.push_back(source(device, on_device(0, std::string(size, 'x')), size, guarded));
      }
    }
    const auto job = stage(&engine, sources, {{device, program}});
    job->hold(device, program);
    job->wait();
    EXPECT_EQ(staged_bytes(*job, 0), "xxx");
    Source written;
    written.data = on_device(0, "written");
    written.size = 7;
    written.device = device;
    const TempDirectory directory;
    const std::string path = directory.file("file");
    const auto write = engine.start_write(path, {Direct::kAuto, false, 0});
    write->add(nullptr, written);
    write->finish();
    const auto read = engine.make_read(Direct::kAuto, true);
    read->add_file(path);
    Destination destination;
    destination.data = cuda_.allocate(0, 7);
    destination.device = device;
    read->add(0, 0, 7, destination);
    read->run();
    EXPECT_EQ(bytes_at(destination.data, 7), "written");
    // In the middle of it, too: what was queued is waited for.
    cuda_.fail("cudaMemcpyAsync", 2, cudaErrorMemoryAllocation);
    EXPECT_THROW(stage(&engine, {sources[4], sources[5]}, {{device, program}})->wait(), CudaError);
    EXPECT_TRUE(cuda_.heal());
  }
};

TEST_F(CaptureCudaTest, NothingThatAnEngineDoesEndsACapture) {
  const cudaStream_t captured = cuda_.make_stream(0);
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    cuda_.begin_capture(captured, mode);
    use_an_engine();  // on the thread that captures
    EXPECT_EQ(cuda_.end_capture(captured), cudaSuccess);
    cuda_.begin_capture(captured, mode);
    beside([&] { use_an_engine(); }).get();
    EXPECT_EQ(cuda_.end_capture(captured), cudaSuccess);
  }
}

TEST_F(CaptureCudaTest, PrewarmingDoesNotEndACapture) {
  const cudaStream_t captured = cuda_.make_stream(0);
  cuda_.begin_capture(captured);
  beside([&] { Engine(small()).prewarm(1 << 20, Arena::Kind::kShared, {0, 1}); }).get();
  EXPECT_EQ(cuda_.end_capture(captured), cudaSuccess);
}

TEST_F(CaptureCudaTest, ThreadsGetTheirModeBack) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  cudaThreadExchangeStreamCaptureMode(&mode);
  use_an_engine();
  cudaThreadExchangeStreamCaptureMode(&mode);
  EXPECT_EQ(mode, cudaStreamCaptureModeThreadLocal);
}

// What is captured does not happen now: it need not wait, and waiting would end the capture.
TEST_F(CaptureCudaTest, AStreamThatCapturesIsNotHeld) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const cudaStream_t other = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  std::byte* const memory = on_device(0, "before");
  const auto job = stage(&engine, {source(device, memory, 6, true)}, {{device, program}});
  cuda_.begin_capture(program);
  job->hold(device, program);
  write_later(program, memory, "captured");
  job->hold(device, other);
  write_later(other, memory, "behind");
  EXPECT_EQ(cuda_.end_capture(program), cudaSuccess);
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "before");
  cuda_.release(copies);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "before");
}

// A save that is called within a capture fails, with the capture as it was.
TEST_F(CaptureCudaTest, AStateThatIsBeingCapturedIsNotSaved) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto save = [&] {
    return stage(&engine, {source(device, on_device(0, "abc"), 3, true)}, {{device, program}});
  };
  cuda_.begin_capture(program);
  try {
    save();
    ADD_FAILURE() << "the state of a graph that never ran";
  } catch (const CudaError& error) {
    EXPECT_NE(std::string(error.what()).find("before the capture, or after it"), std::string::npos);
  }
  EXPECT_EQ(cuda_.end_capture(program), cudaSuccess);
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
  save()->wait();
}

// An optimizer's offloaded state goes with its last owner, on whichever thread, at any time.
TEST_F(CaptureCudaTest, MemoryIsRegisteredAndLetGoWhileAThreadCaptures) {
  constexpr size_t kSize = 4096;
  std::vector<std::byte> host(kSize);
  std::byte* const memory = on_device(0, std::string(kSize, 'x'));
  const cudaStream_t copies = cuda_.make_stream(0);
  const cudaStream_t captured = cuda_.make_stream(0);
  cuda_.begin_capture(captured);
  auto use = beside([&] {
    cuda_.set_registration_limit(0);
    EXPECT_THROW(register_host_memory(0, host.data(), kSize), CudaError);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    cuda_.set_registration_limit(SIZE_MAX);
    register_host_memory(0, host.data(), kSize);
    cuda_.hold(copies);
    EXPECT_EQ(cudaMemcpyAsync(host.data(), memory, kSize, cudaMemcpyDeviceToHost, copies),
              cudaSuccess);
    unregister_host_memory_after(0, copies, host.data());
    EXPECT_EQ(bytes_at(host.data(), kSize), std::string(kSize, 'x'));
  });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.release(copies);
  use.get();
  EXPECT_EQ(cuda_.live_registrations(), 0u);
  EXPECT_EQ(cuda_.end_capture(captured), cudaSuccess);
}

}  // namespace
}  // namespace pyckpt
