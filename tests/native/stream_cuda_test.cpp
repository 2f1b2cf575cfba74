// Bytes that are taken from devices: through a slot, when they are there, and not before.
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "crc32.h"
#include "cuda_support.h"
#include "error.h"
#include "stream_job.h"

namespace pyckpt {
namespace {

using namespace test;

class StreamCudaTest : public CudaTest {
 protected:
  static std::string take(StreamJob* job) {
    std::string window(job->next_size(), '\xff');
    if (!window.empty()) job->take(reinterpret_cast<std::byte*>(window.data()));
    return window;
  }

  static std::string take_all(StreamJob* job) {
    std::string bytes;
    for (std::string window = take(job); !window.empty(); window = take(job)) bytes += window;
    return bytes;
  }

  // How many of a held stream's copies were not over when `f` was. The stream is let go once `f`
  // sleeps.
  size_t left_behind(cudaStream_t copies, const std::function<void()>& f) {
    std::promise<pid_t> thread;
    Gate seen;
    size_t left = 0;
    auto call = beside([&] {
      thread.set_value(::gettid());
      f();
      left = cuda_.pending_copies(copies);
      seen.wait();
    });
    wait_until_asleep(thread.get_future().get());
    cuda_.release(copies);
    seen.open();
    call.get();
    return left;
  }

  const std::string page_ = random_bytes(random_, 4096);  // fills a window
};

TEST_F(StreamCudaTest, StreamsAllSizes) {
  Engine engine(small());
  const auto device = engine.cuda_device(1);
  const auto job = engine.start_stream();
  auto taken = std::async(std::launch::async, [&] { return take_all(job.get()); });
  std::vector<Sample> samples;
  for (const size_t size : {0, 1, 4095, 4096, 4097, 7919, 65535, 65536, 262145, (1 << 20) + 1}) {
    Sample sample;
    sample.payload = random_bytes(random_, size);
    sample.envelope = make_envelope(random_, 100, 50, size);
    sample.source = device_source(device, on_device(1, sample.payload), size);
    samples.push_back(std::move(sample));
    samples.push_back(make_sample(nullptr, random_bytes(random_, size)));
  }
  for (const Sample& sample : samples) {
    if (!job->add(sample.envelope, sample.source)) job->wait_for_room();
  }
  job->finish();
  std::vector<Place> places;
  EXPECT_EQ(difference(taken.get(), reference_file(samples, &places)), "");
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(job->items()[i].crc, places[i].crc);
}

TEST_F(StreamCudaTest, ATakeWaitsForItsCopies) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  const auto job = engine.start_stream();
  job->add(nullptr, device_source(device, on_device(0, page_), page_.size()));
  auto taken = std::async(std::launch::async, [&] { return take(job.get()); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(cuda_.pending_copies(copies), 1u);
  EXPECT_EQ(job->consumed(), 0u);
  cuda_.release(copies);
  EXPECT_EQ(difference(taken.get(), page_), "");
  job->finish();
  EXPECT_EQ(job->items()[0].crc, crc32(0, page_.data(), page_.size()));
}

// What the program still writes comes before; also where it has a graph captured meanwhile.
TEST_F(StreamCudaTest, ATakeFollowsTheProgram) {
  for (const bool captures : {false, true}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    const cudaStream_t other = cuda_.make_stream(0);
    std::byte* const memory = on_device(0, std::string(page_.size(), '?'));
    const auto job = engine.start_stream();
    cuda_.hold(program);
    write_later(program, memory, page_);
    device->follow(program);
    job->add(nullptr, device_source(device, memory, page_.size()));
    if (captures) cuda_.begin_capture(other);
    auto taken = std::async(std::launch::async, [&] { return take(job.get()); });
    EXPECT_TRUE(cuda_.blocked(1));
    cuda_.settle();
    cuda_.release(program);
    EXPECT_EQ(difference(taken.get(), page_), "");
    if (captures) {
      EXPECT_EQ(cuda_.end_capture(other), cudaSuccess);
    }
    job->finish();
  }
}

// Else the program would free memory that a device still reads, or give the slot's to others.
TEST_F(StreamCudaTest, WhoEndsAJobWaitsForTheTake) {
  for (const bool abandons : {false, true}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const auto copies = static_cast<cudaStream_t>(device->to_host());
    cuda_.hold(copies);
    const auto job = engine.start_stream();
    job->add(nullptr, device_source(device, on_device(0, page_), page_.size()));
    auto taken = std::async(std::launch::async, [&] { return take(job.get()); });
    EXPECT_TRUE(cuda_.blocked(1));
    const auto end = [&] { abandons ? job->abandon() : job->finish(); };
    EXPECT_EQ(left_behind(copies, end), 0u) << abandons;
    if (abandons) {
      EXPECT_THROW(taken.get(), std::runtime_error);
    } else {
      EXPECT_EQ(difference(taken.get(), page_), "");
    }
  }
}

TEST_F(StreamCudaTest, TheEngineClosesWhileATakeWaits) {
  auto engine = std::make_unique<Engine>(small());
  const auto device = engine->cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  auto job = engine->start_stream();
  for (int i = 0; i < 2; ++i) {
    job->add(nullptr, device_source(device, on_device(0, page_), page_.size()));
  }
  auto taken = std::async(std::launch::async, [&] { return take(job.get()); });
  EXPECT_TRUE(cuda_.blocked(1));
  engine->close();
  EXPECT_EQ(cuda_.pending_copies(copies), 1u);
  EXPECT_THROW(job->finish(), EngineClosed);
  cuda_.release(copies);
  EXPECT_THROW(taken.get(), EngineClosed);
  EXPECT_THROW(take(job.get()), EngineClosed);
}

TEST_F(StreamCudaTest, AFailedTakeLeavesAFitEngine) {
  for (const char* call : {"cudaMemcpyAsync", "cudaEventCreateWithFlags", "cudaEventRecord",
                           "cudaEventSynchronize", "cudaStreamCreateWithFlags", "cudaSetDevice",
                           "cudaDeviceGetAttribute", "cudaHostRegister"}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    std::byte* const memory = on_device(0, page_);
    for (const bool fails : {true, false}) {
      const auto job = engine.start_stream();
      job->add(nullptr, device_source(device, memory, page_.size()));
      if (!fails) {
        EXPECT_EQ(difference(take(job.get()), page_), "");
        job->finish();
        continue;
      }
      cuda_.fail(call, 1);
      EXPECT_THROW(take(job.get()), CudaError) << call;
      EXPECT_THROW(job->finish(), CudaError) << call;
      EXPECT_TRUE(cuda_.heal());
    }
  }
}

}  // namespace
}  // namespace pyckpt
