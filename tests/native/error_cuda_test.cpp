// CUDA calls that fail while a state is staged: the error arrives, nothing hangs, and no memory is
// given away that a queued copy still uses.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda_support.h"
#include "error.h"
#include "stage_job.h"

namespace pyckpt {
namespace {

using namespace test;

class ErrorCudaTest : public CudaTest {
 protected:
  // A state of two devices, of all that is copied in different ways.
  struct State {
    std::vector<StageSource> sources;
    std::vector<std::string> expected;
  };
  State make_state(Engine* engine) {
    State state;
    for (const int index : {0, 1}) {
      for (const bool guarded : {false, true}) {
        for (const size_t size : {10, 5000, (2 << 20) + 1, 20}) {
          state.expected.push_back(random_bytes(random_, size));
          state.sources.push_back(source(engine->cuda_device(index),
                                         on_device(index, state.expected.back()), size, guarded));
        }
      }
    }
    return state;
  }

  Programs programs(Engine* engine) {
    return {{engine->cuda_device(0), programs_[0]}, {engine->cuda_device(1), programs_[1]}};
  }

  std::shared_ptr<StageJob> stage_and_wait(Engine* engine, const State& state) {
    const auto job = stage(engine, state.sources, programs(engine));
    for (const auto& [device, program] : programs(engine)) job->hold(device, program);
    job->wait();
    for (size_t i = 0; i < state.expected.size(); ++i) {
      EXPECT_EQ(difference(staged_bytes(*job, i), state.expected[i]), "");
    }
    return job;
  }

  const cudaStream_t programs_[2] = {cuda_.make_stream(0), cuda_.make_stream(1)};
};

TEST_F(ErrorCudaTest, EachCallInTurn) {
  for (const char* call : {"cudaSetDevice", "cudaDeviceGetAttribute", "cudaStreamCreateWithFlags",
                           "cudaStreamIsCapturing", "cudaStreamWaitEvent",
                           "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize",
                           "cudaMemcpyAsync", "cudaHostRegister", "cudaLaunchKernel"}) {
    size_t n = 0;
    for (bool failed = true; failed;) {
      ++n;
      Engine engine({4096, 2, 2, 64 << 20});  // room for two jobs
      const State state = make_state(&engine);
      cuda_.fail(call, n, cudaErrorMemoryAllocation);
      std::shared_ptr<StageJob> job;  // whose destructor has nobody to tell
      bool thrown = false;
      std::string text = "nothing was thrown";
      const bool ended = returns(
          [&] {
            try {
              job = stage_and_wait(&engine, state);
            } catch (const CudaError& error) {
              thrown = true;
              text = error.what();
            }
          },
          [&] { engine.close(); });
      ASSERT_TRUE(ended) << call << ", call " << n;
      failed = cuda_.heal();
      ASSERT_EQ(thrown, failed) << call << ", call " << n << ": " << text;
      if (!failed) break;
      EXPECT_NE(text.find("cudaErrorMemoryAllocation: out of memory"), std::string::npos) << text;
      stage_and_wait(&engine, state);
      engine.close();  // whose threads may still have held the jobs
      EXPECT_EQ(engine.arena().used_bytes(), 0u) << call << ", call " << n;
    }
    EXPECT_GT(n, 1u) << call << " was not called";
  }
}

// The copies queued before one that could not be queued are over when the error arrives.
TEST_F(ErrorCudaTest, WaitsForWhatWasQueuedBeforeAnError) {
  for (const bool guarded : {false, true}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const auto copies = static_cast<cudaStream_t>(device->to_host());
    cuda_.hold(copies);
    std::vector<StageSource> sources;
    for (int i = 0; i < 2; ++i) {
      sources.push_back(source(device, cuda_.allocate(0, 3 << 20), 3 << 20, guarded));
    }
    cuda_.fail("cudaMemcpyAsync", 2);
    auto staging = beside([&] {
      const auto job = stage(&engine, sources, {{device, programs_[0]}});
      job->wait();
    });
    EXPECT_TRUE(cuda_.blocked(1));
    EXPECT_EQ(cuda_.pending_copies(copies), 1u);
    EXPECT_GT(engine.arena().used_bytes(), 0u);
    cuda_.release(copies);
    EXPECT_THROW(staging.get(), CudaError);
    EXPECT_TRUE(cuda_.heal());
    engine.close();  // whose threads may still have held the job
    EXPECT_EQ(engine.arena().used_bytes(), 0u);
  }
}

TEST_F(ErrorCudaTest, ADeviceIsLostWhileItCopies) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  cuda_.hold(static_cast<cudaStream_t>(device->to_host()));
  const std::string host = random_bytes(random_, 100000);
  std::vector<StageSource> sources = {
      source(device, on_device(0, "abc"), 3, false), source(device, on_device(0, "def"), 3, true),
      source(nullptr, reinterpret_cast<const std::byte*>(host.data()), host.size(), true)};
  const auto job = stage(&engine, sources, {{device, programs_[0]}});
  job->wait_host();
  auto waits = beside([&] { job->wait(); });
  auto release = beside([&] { job->release_regions(); });
  EXPECT_TRUE(cuda_.blocked(2));
  cuda_.lose(0);
  EXPECT_THROW(waits.get(), CudaError);
  release.get();
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
  for (const size_t i : {0, 1}) {
    try {
      job->staged()[i]->wait();
      ADD_FAILURE() << "a copy that never was";
    } catch (const CudaError& error) {
      EXPECT_STREQ(error.what(),
                   "cudaEventSynchronize failed: cudaErrorLaunchFailure: unspecified launch "
                   "failure");
    }
  }
  EXPECT_THROW(job->hold(device, programs_[0]), CudaError);
  EXPECT_THROW(stage(&engine, sources, {{device, programs_[0]}}), CudaError);
  // The other device, and the host, go on.
  const auto next =
      stage(&engine, {source(engine.cuda_device(1), on_device(1, "xyz"), 3, true), sources[2]},
            {{engine.cuda_device(1), programs_[1]}});
  next->wait();
  EXPECT_EQ(staged_bytes(*next, 0), "xyz");
  EXPECT_EQ(difference(staged_bytes(*next, 1), host), "");
}

// Memory that cannot be registered is not lost to those that need not have it registered.
TEST_F(ErrorCudaTest, RefusedRegistrationLosesNoMemory) {
  const auto arena = std::make_shared<Arena>(2 << 20);
  arena->allocate(2 << 20, Arena::Kind::kPrivate)->give_back();
  cuda_.fail("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  EXPECT_THROW(arena->allocate(4096, Arena::Kind::kPrivate, 0), CudaError);
  EXPECT_EQ(arena->used_bytes(), 0u);
  EXPECT_TRUE(arena->allocate(2 << 20, Arena::Kind::kPrivate, 0));
  EXPECT_EQ(cuda_.live_registrations(), 1u);

  const auto small = std::make_shared<Arena>(2 << 20);
  cuda_.fail("cudaHostRegister", 1);
  EXPECT_THROW(small->reserve(1, Arena::Kind::kShared, 0, true), CudaError);
  EXPECT_EQ(small->held_bytes(), 0u);
  EXPECT_TRUE(small->allocate(2 << 20, Arena::Kind::kShared, 0));
}

// Destructors have nobody to tell.
TEST_F(ErrorCudaTest, FailuresToGiveBackAreNotTheProgramsErrors) {
  for (const char* call : {"cudaHostUnregister", "cudaEventDestroy", "cudaStreamDestroy"}) {
    {
      Engine engine(small());
      const State state = make_state(&engine);
      stage_and_wait(&engine, state);
      cuda_.fail(call, 1);
    }
    EXPECT_TRUE(cuda_.heal()) << call;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << call;
  }
}

TEST_F(ErrorCudaTest, MemoryIsRegisteredOnce) {
  PinnedBuffer buffer(1 << 20);
  parallelize(4, [&](size_t) { buffer.pin(0); });
  EXPECT_EQ(cuda_.calls("cudaHostRegister"), 1u);
  EXPECT_EQ(cuda_.live_registrations(), 1u);
}

TEST_F(ErrorCudaTest, DevicesHaveNumbersFromZeroOn) {
  Engine engine(small());
  EXPECT_THROW(engine.cuda_device(-1), std::invalid_argument);
  EXPECT_THROW(engine.cuda_device(7)->to_host(), CudaError);
}

}  // namespace
}  // namespace pyckpt
