// Staging from devices: what is copied is the state at the call, whatever order the device takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_support.h"
#include "device_copies.h"
#include "error.h"
#include "pack.h"
#include "stage_job.h"

namespace pyckpt {
namespace {

using namespace test;

// What a job that copies little copies between two tickets.
constexpr size_t kTicketBytes = ticket_bytes(0);

class StageCudaTest : public CudaTest {
 protected:
  // Three sources, a ticket each; the guard, or the hold of the program's stream, must be for the
  // last.
  void outlast_all_tickets(bool guarded) {
    Engine engine({4096, 2, 2, 4 * kTicketBytes});
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    const auto copies = static_cast<cudaStream_t>(device->to_host());
    cuda_.hold(copies);
    std::vector<StageSource> sources;
    std::byte* last = nullptr;
    for (int i = 0; i < 3; ++i) {
      last = cuda_.allocate(0, kTicketBytes);
      sources.push_back(source(device, last, kTicketBytes, guarded));
    }
    const auto job = stage(&engine, sources, {{device, program}});
    if (guarded) job->hold(device, program);
    write_later(program, last, "overwritten");
    job->wait_host();
    while (cuda_.pending_copies(copies) > 1) cuda_.step(copies);
    cuda_.step(copies);  // the event behind the copy before the last
    cuda_.settle();
    EXPECT_EQ(bytes_at(last, 11), std::string(11, '\0'));
    cuda_.release(copies);
    job->wait();
    EXPECT_EQ(staged_bytes(*job, 2).substr(0, 11), std::string(11, '\0'));
  }
};

TEST_F(StageCudaTest, SeesWhatTheProgramWroteBeforeTheCall) {
  for (const bool guarded : {false, true}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    cuda_.hold(program);
    std::byte* const memory = on_device(0, "before");
    write_later(program, memory, "behind");
    const auto job = stage(&engine, {source(device, memory, 6, guarded)}, {{device, program}});
    job->wait_host();
    cuda_.settle();  // whatever can be copied now is copied
    cuda_.release(program);
    job->wait();
    EXPECT_EQ(staged_bytes(*job, 0), "behind");
  }
}

TEST_F(StageCudaTest, TheProgramWaitsForWhatIsNotGuarded) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  std::byte* const memory = on_device(0, "before");
  const auto job = stage(&engine, {source(device, memory, 6, false)}, {{device, program}});
  write_later(program, memory, "behind");
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "before");
  cuda_.release(copies);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "before");
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "behind");
}

TEST_F(StageCudaTest, TheGuardHoldsTheStreamThatSteps) {
  for (const bool same_stream : {true, false}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    const cudaStream_t steps = same_stream ? program : cuda_.make_stream(0);
    const auto copies = static_cast<cudaStream_t>(device->to_host());
    cuda_.hold(copies);
    std::byte* const guarded = on_device(0, "before");
    bool went_on = false;
    const auto job = stage(&engine, {source(device, guarded, 6, true)}, {{device, program}});
    // Until it steps, the program computes.
    cuda_.enqueue(program, [&] { went_on = true; });
    cuda_.settle();
    EXPECT_TRUE(went_on);
    job->hold(device, steps);
    write_later(steps, guarded, "behind");
    cuda_.settle();
    EXPECT_EQ(bytes_at(guarded, 6), "before");
    cuda_.release(copies);
    job->wait();
    EXPECT_EQ(staged_bytes(*job, 0), "before");
  }
}

// What the guard is for; and that these tests would see a wait that is missing.
TEST_F(StageCudaTest, WithoutTheGuardItTears) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  std::byte* const memory = on_device(0, "before");
  const auto job = stage(&engine, {source(device, memory, 6, true)}, {{device, program}});
  write_later(program, memory, "behind");
  cuda_.settle();
  cuda_.release(copies);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "behind");
}

TEST_F(StageCudaTest, TheProgramWaitsForTheLastTicket) { outlast_all_tickets(false); }
TEST_F(StageCudaTest, TheGuardWaitsForTheLastTicket) { outlast_all_tickets(true); }

// All threads that write wait for a device, or for a disk: nothing that a program does needs them.
TEST_F(StageCudaTest, TheGuardDoesNotWaitForTheSaveBefore) {
  Engine engine({4096, 2, 1, 16 << 20});
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const TempDirectory directory;
  const auto write = engine.start_write(directory.file("a"), {Direct::kAuto, false, 0});
  cuda_.hold(copies);
  Source other;
  other.data = on_device(0, std::string(4096, 'x'));
  other.size = 4096;
  other.device = device;
  write->add(nullptr, other);
  EXPECT_TRUE(cuda_.blocked(1));
  std::byte* const memory = on_device(0, "before");
  const auto job = stage(&engine, {source(device, memory, 6, true)}, {{device, program}});
  EXPECT_EQ(cuda_.pending_copies(copies), 2u);  // queued, as the call returns
  EXPECT_TRUE(returns([&] { job->hold(device, program); }, [&] { cuda_.release(copies); }));
  write_later(program, memory, "behind");
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "before");
  cuda_.release(copies);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "before");
  write->finish();
}

// The program goes on without the guard: what it may have torn is not called whole, neither by
// those who wait already nor by those who come later, nor written.
TEST_F(StageCudaTest, AHoldThatFailsFailsTheSave) {
  Engine engine({4096, 4, 2, 16 << 20});
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  std::byte* const memory = on_device(0, std::string(4096, 'x'));
  const auto job = stage(&engine, {source(device, memory, 4096, true)}, {{device, program}});
  const TempDirectory directory;
  const auto write = engine.start_write(directory.file("a"), {Direct::kAuto, false, 0});
  Source staged;
  staged.data = job->staged()[0]->data();
  staged.size = 4096;
  staged.staged = job->staged()[0];
  write->add(nullptr, staged);
  auto waits = beside([&] { job->staged()[0]->wait(); });
  EXPECT_TRUE(cuda_.blocked(2));
  cuda_.fail("cudaStreamWaitEvent", 1);
  EXPECT_THROW(job->hold(device, program), CudaError);
  EXPECT_TRUE(cuda_.heal());
  write_later(program, memory, "torn");
  cuda_.settle();
  cuda_.release(copies);
  EXPECT_THROW(waits.get(), CudaError);
  EXPECT_THROW(job->wait(), CudaError);
  EXPECT_THROW(job->staged()[0]->wait(), CudaError);
  EXPECT_THROW(write->finish(), CudaError);
}

TEST_F(StageCudaTest, SourcesStayWhileADeviceReadsThem) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const cudaStream_t program = cuda_.make_stream(0);
  cuda_.hold(copies);
  const auto owner = std::make_shared<int>(0);
  StageJob::Options options;
  options.pin_device = 0;
  options.programs = {{device, program}};
  options.sources = owner;
  const auto job =
      engine.start_stage({source(device, on_device(0, "abc"), 3, true)}, std::move(options));
  job->fail(std::make_exception_ptr(EngineClosed("closed")));
  EXPECT_THROW(job->wait(), EngineClosed);
  auto release = beside([&] { job->release_sources(); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(owner.use_count(), 2);
  cuda_.release(copies);
  release.get();
  EXPECT_EQ(owner.use_count(), 1);
}

// The event that one call records may be the one that another call recorded before.
TEST_F(StageCudaTest, FollowsSeveralStreams) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const cudaStream_t other = cuda_.make_stream(0);
  std::byte* const memory = on_device(0, "before");
  cuda_.hold(program);
  write_later(program, memory, "behind");
  device->follow(program);
  const auto job = stage(&engine, {source(device, memory, 6, false)}, {{device, other}});
  cuda_.settle();
  cuda_.release(program);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "behind");
}

TEST_F(StageCudaTest, TheDefaultStreamIsAProgramToo) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const cudaStream_t program = cuda_.default_stream(0);
  std::byte* const memory = on_device(0, "before");
  std::byte* const guarded = on_device(0, "before");
  cuda_.hold(program);
  write_later(program, memory, "behind");
  const auto job = stage(&engine, {source(device, memory, 6, false)}, {{device, nullptr}});
  cuda_.settle();
  cuda_.release(program);
  job->wait();
  EXPECT_EQ(staged_bytes(*job, 0), "behind");
  // Copies neither hold it up nor wait for it, but where they are told to.
  cuda_.hold(copies);
  const auto next = stage(&engine, {source(device, guarded, 6, true)}, {{device, nullptr}});
  next->wait_host();
  write_later(program, memory, "beside");
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "beside");
  cuda_.hold(program);
  write_later(program, memory, "at end");
  cuda_.release(copies);
  next->wait();
  EXPECT_EQ(staged_bytes(*next, 0), "before");
  cuda_.release(program);
}

TEST_F(StageCudaTest, AllSizes) {
  const std::vector<size_t> sizes = {
      0,        1,         3,      4095,         4096, 4097, 4096 * 2, 7919, (64 << 10) - 1,
      64 << 10, 256 << 10, 262145, (1 << 20) + 1};
  for (const bool same_addresses : {true, false}) {
    cuda_.set_same_addresses(same_addresses);
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    std::vector<StageSource> sources;
    std::vector<std::string> expected;
    for (const bool guarded : {false, true}) {
      for (const size_t size : sizes) {
        expected.push_back(random_bytes(random_, size));
        sources.push_back(source(device, on_device(0, expected.back()), size, guarded));
      }
    }
    const size_t launches = cuda_.launches().size();
    const auto job = stage(&engine, sources, {{device, cuda_.make_stream(0)}});
    job->wait();
    for (size_t i = 0; i < sources.size(); ++i) {
      EXPECT_EQ(difference(staged_bytes(*job, i), expected[i]), "");
      EXPECT_FALSE(job->staged()[i]->checksummed);
    }
    EXPECT_EQ(cuda_.launches().size() - launches, same_addresses ? 2u : 0u);
    const auto sum = [](uint64_t all, const StageSource& one) { return all + one.size; };
    EXPECT_EQ(job->statistics().bytes_staged,
              std::accumulate(sources.begin(), sources.end(), uint64_t{0}, sum));
  }
}

TEST_F(StageCudaTest, ManySmallOnesLeaveInOneLaunch) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto launches = [&](size_t count) {
    const size_t before = cuda_.launches().size();
    std::vector<StageSource> sources;
    std::vector<std::string> expected;
    for (size_t i = 0; i < count; ++i) {
      expected.push_back(random_bytes(random_, draw(random_, 1, 300)));
      sources.push_back(
          source(device, on_device(0, expected.back()), expected.back().size(), i % 2 == 0));
    }
    const auto job = stage(&engine, sources, {{device, program}});
    job->wait();
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(staged_bytes(*job, i), expected[i]);
    auto all = cuda_.launches();
    return std::vector<size_t>(all.begin() + static_cast<ptrdiff_t>(before), all.end());
  };
  EXPECT_EQ(launches(600), (std::vector<size_t>{300, 300}));
  EXPECT_EQ(launches(2), (std::vector<size_t>{}));  // one alone is a copy
  EXPECT_EQ(launches(2 * kPackTransfers), (std::vector<size_t>{kPackTransfers, kPackTransfers}));
  EXPECT_EQ(
      launches(4 * kPackTransfers + 2),
      (std::vector<size_t>{kPackTransfers, kPackTransfers, 1, kPackTransfers, kPackTransfers, 1}));
}

TEST_F(StageCudaTest, TheProgramsThreadNeverWaitsForTheDevice) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  cuda_.hold(static_cast<cudaStream_t>(device->to_host()));
  cuda_.hold(program);
  std::vector<StageSource> sources;
  for (size_t i = 0; i < 100; ++i) {
    sources.push_back(source(device, cuda_.allocate(0, 1000 * i), 1000 * i, i % 2 == 0));
  }
  const auto job = stage(&engine, sources, {{device, program}});
  job->wait_volatile();
  job->hold(device, program);
  job->wait_host();
  EXPECT_EQ(cuda_.program_waits(), 0u);
  cuda_.release_all();
  job->wait();
}

// CUDA's driver takes about a thousand entries of a queue, and then makes the thread wait until the
// device has done some. What the device waits for may be a thread that needs the engine.
TEST_F(StageCudaTest, AFullQueueHoldsUpNobodyElse) {
  constexpr size_t kSources = 100;
  constexpr size_t kSize = 4096;
  for (const bool guarded : {false, true}) {
    cuda_.set_same_addresses(false);  // nothing is packed, so that each copy is an entry
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const auto other = engine.cuda_device(1);
    const cudaStream_t program = cuda_.make_stream(0);
    const cudaStream_t elsewhere = cuda_.make_stream(1);
    const std::string bytes = random_bytes(random_, kSources * kSize);
    std::byte* const memory = on_device(0, bytes);
    std::byte* const there = on_device(1, "there");
    std::vector<StageSource> sources;
    for (size_t i = 0; i < kSources; ++i) {
      sources.push_back(source(device, memory + i * kSize, kSize, guarded));
    }
    std::promise<void> others_are_done;
    cuda_.hold(program);
    cuda_.enqueue(program, [&] { others_are_done.get_future().wait(); });
    cuda_.set_depth(8);
    auto saving = beside([&] {
      const auto job = stage(&engine, sources, {{device, program}});
      job->hold(device, program);
      job->wait();
      for (size_t i = 0; i < kSources; ++i) {
        EXPECT_EQ(staged_bytes(*job, i), bytes.substr(i * kSize, kSize));
      }
    });
    EXPECT_TRUE(cuda_.blocked(1));
    cuda_.release(program);
    EXPECT_TRUE(returns(
        [&] {
          EXPECT_GT(engine.arena().used_bytes(), 0u);
          EXPECT_EQ(engine.cuda_device(0), device);
          const auto job = stage(&engine, {source(other, there, 5, guarded)}, {{other, elsewhere}});
          job->wait();
          EXPECT_EQ(staged_bytes(*job, 0), "there");
          others_are_done.set_value();
        },
        [&] { others_are_done.set_value(); }));
    saving.get();
    cuda_.set_depth(SIZE_MAX);
  }
}

// Each is an entry, too.
TEST(TicketBytesTest, OfALargeStateTicketsAreNotManyMore) {
  EXPECT_EQ(ticket_bytes(1), uint64_t{16} << 20);
  EXPECT_EQ(ticket_bytes(uint64_t{1} << 30), uint64_t{16} << 20);
  for (const uint64_t total : {uint64_t{1} << 31, uint64_t{100} << 30, uint64_t{1} << 42}) {
    EXPECT_EQ(total / ticket_bytes(total), 64u);
  }
}

TEST_F(StageCudaTest, SeveralDevices) {
  Engine engine(small());
  const std::shared_ptr<Device> devices[] = {engine.cuda_device(0), engine.cuda_device(1)};
  EXPECT_EQ(engine.cuda_device(1), devices[1]);
  EXPECT_EQ(devices[1]->index(), 1);
  const cudaStream_t programs[] = {cuda_.make_stream(0), cuda_.make_stream(1)};
  std::vector<StageSource> sources;
  for (const bool guarded : {false, true}) {
    for (int i = 0; i < 2; ++i) {
      cuda_.hold(programs[i]);
      std::byte* const memory = on_device(i, "before");
      write_later(programs[i], memory, "late " + std::to_string(i));
      sources.push_back(source(devices[i], memory, 6, guarded));
    }
  }
  const auto job = stage(&engine, sources, {{devices[0], programs[0]}, {devices[1], programs[1]}});
  for (int i = 0; i < 2; ++i) {
    job->hold(devices[i], programs[i]);
    for (const size_t of : {i, i + 2}) {
      write_later(programs[i], const_cast<std::byte*>(sources[of].data), "broken");
    }
  }
  cuda_.settle();
  cuda_.release(programs[1]);
  cuda_.settle();
  cuda_.release(programs[0]);
  job->wait();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(staged_bytes(*job, i), "late " + std::to_string(i % 2));
  }
}

// A context costs hundreds of megabytes; a process of a node makes none on its neighbours' devices.
TEST_F(StageCudaTest, TouchesNoOtherDevice) {
  cudaSetDevice(1);
  auto engine = std::make_unique<Engine>(small());
  auto device = engine->cuda_device(1);
  const cudaStream_t program = cuda_.make_stream(1);
  std::vector<StageSource> sources;
  for (const bool guarded : {false, true}) {
    sources.push_back(source(device, on_device(1, "abc"), 3, guarded));
  }
  auto job = stage(engine.get(), sources, {{device, program}});
  job->hold(device, program);
  beside([&] { job->wait(); }).get();  // on a thread that never chose a device
  EXPECT_EQ(staged_bytes(*job, 1), "abc");
  beside([&] { job->release_regions(); }).get();
  beside([&] {
    job.reset();
    device.reset();
    engine.reset();
  }).get();
  EXPECT_EQ(cuda_.contexts(), (std::set<int>{1}));
}

TEST_F(StageCudaTest, PrewarmingLeavesNothingToTheFirstSave) {
  auto engine = std::make_unique<Engine>(EngineOptions{4096, 2, 2, 16 << 20});
  // On a thread that never chose a device.
  beside([&] { engine->prewarm(1 << 20, Arena::Kind::kPrivate, {1}); }).get();
  EXPECT_EQ(cuda_.contexts(), (std::set<int>{1}));
  const auto made = [&] {
    return cuda_.calls("cudaHostRegister") + cuda_.calls("cudaStreamCreateWithFlags") +
           cuda_.calls("cudaEventCreateWithFlags") + cuda_.loaded(true) + cuda_.loaded(false);
  };
  const size_t before = made();
  cudaSetDevice(1);
  const auto device = engine->cuda_device(1);
  std::vector<StageSource> sources;
  for (int i = 0; i < 500; ++i) {
    sources.push_back(source(device, on_device(1, "abc"), 3, /*guarded=*/i % 3 == 0));
  }
  const auto job = stage(engine.get(), sources, {{device, cuda_.make_stream(1)}});
  job->wait();
  EXPECT_FALSE(cuda_.launches().empty());
  EXPECT_EQ(made(), before);
  EXPECT_EQ(engine->arena().held_bytes(), 2u << 20);
}

TEST_F(StageCudaTest, PrewarmsSeveralDevices) {
  Engine engine(small());
  engine.prewarm(1, Arena::Kind::kShared, {0, 1});
  EXPECT_EQ(cuda_.live_streams(), 4u);
  EXPECT_EQ(cuda_.loaded(true), 2u);
  engine.prewarm(1, Arena::Kind::kShared, {});  // is there already
  EXPECT_EQ(engine.arena().held_bytes(), 2u << 20);
  EXPECT_THROW(engine.prewarm(1, Arena::Kind::kShared, {7}), CudaError);
}

TEST_F(StageCudaTest, TheSameMemoryIsCopiedOnce) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  std::byte* const memory = on_device(0, "shared");
  const auto job = stage(&engine,
                         {source(device, memory, 6, true), source(device, memory, 6, false),
                          source(device, memory, 3, false)},
                         {{device, cuda_.make_stream(0)}});
  job->wait();
  EXPECT_EQ(job->staged()[0], job->staged()[1]);
  EXPECT_NE(job->staged()[0], job->staged()[2]);
  EXPECT_EQ(staged_bytes(*job, 0), "shared");
  EXPECT_EQ(staged_bytes(*job, 2), "sha");
}

TEST_F(StageCudaTest, RefusesAStreamThatCapturesAGraph) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  cuda_.begin_capture(program);
  EXPECT_THROW(device->follow(program), CudaError);
  EXPECT_EQ(cuda_.end_capture(program), cudaSuccess);
  device->follow(program);
}

TEST_F(StageCudaTest, TheMemoryOfAJobIsNotGivenBackWhileItIsWrittenTo) {
  for (const bool guarded : {false, true}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const auto copies = static_cast<cudaStream_t>(device->to_host());
    const cudaStream_t program = cuda_.make_stream(0);
    // Given back, by two threads at once, though there are tensors that still point there.
    cuda_.hold(copies);
    auto job =
        stage(&engine, {source(device, on_device(0, "abc"), 3, guarded)}, {{device, program}});
    job->wait_host();
    auto first = beside([&] { job->release_regions(); });
    EXPECT_TRUE(cuda_.blocked(1));
    auto second = beside([&] { job->release_regions(); });
    EXPECT_TRUE(cuda_.blocked(2));
    EXPECT_GT(engine.arena().used_bytes(), 0u);
    cuda_.release(copies);
    first.get();
    second.get();
    EXPECT_EQ(engine.arena().used_bytes(), 0u);
    // Dropped with all that was made of it.
    cuda_.hold(copies);
    job = stage(&engine, {source(device, on_device(0, "abc"), 3, guarded)}, {{device, program}});
    job->wait_host();
    auto drop = beside([&] { job.reset(); });
    EXPECT_TRUE(cuda_.blocked(1));
    EXPECT_GT(engine.arena().used_bytes(), 0u);
    cuda_.release(copies);
    drop.get();
    engine.close();  // whose threads may have held the job last
    EXPECT_EQ(engine.arena().used_bytes(), 0u);
  }
}

// The guard, too, while another thread gives the memory back.
TEST_F(StageCudaTest, TheGuardHoldsWhileMemoryIsGivenBack) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const cudaStream_t program = cuda_.make_stream(0);
  cuda_.hold(copies);
  std::byte* const memory = on_device(0, "before");
  const auto job = stage(&engine, {source(device, memory, 6, true)}, {{device, program}});
  auto release = beside([&] { job->release_regions(); });
  EXPECT_TRUE(cuda_.blocked(1));
  job->hold(device, program);
  write_later(program, memory, "behind");
  cuda_.settle();
  EXPECT_EQ(bytes_at(memory, 6), "before");
  cuda_.release(copies);
  release.get();
}

// A tensor outlives its job.
TEST_F(StageCudaTest, WhatWasWaitedForStays) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  auto job = stage(&engine, {source(device, on_device(0, "abc"), 3, true)},
                   {{device, cuda_.make_stream(0)}});
  job->wait();
  const std::shared_ptr<Staged> staged = job->staged()[0];
  job.reset();
  staged->wait();
  EXPECT_EQ(bytes_at(staged->data(), 3), "abc");
}

TEST_F(StageCudaTest, TheEngineClosesInTheMiddle) {
  auto engine = std::make_unique<Engine>(small());
  const auto device = engine->cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const cudaStream_t program = cuda_.make_stream(0);
  cuda_.hold(copies);
  auto job = stage(
      engine.get(),
      {source(device, on_device(0, "abc"), 3, true), source(device, on_device(0, "def"), 3, false)},
      {{device, program}});
  engine->close();
  EXPECT_THROW(job->wait(), EngineClosed);
  EXPECT_THROW(job->staged()[0]->wait(), EngineClosed);
  EXPECT_THROW(job->hold(device, program), EngineClosed);
  EXPECT_THROW(stage(engine.get(), {}, {}), EngineClosed);
  EXPECT_THROW(engine->cuda_device(0), EngineClosed);
  auto drop = beside([&] { job.reset(); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.release(copies);
  drop.get();
}

TEST_F(StageCudaTest, TenThousandStagings) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  std::byte* const memory = cuda_.allocate(0, 100);
  std::byte* const large = cuda_.allocate(0, 70000);
  std::vector<size_t> before;
  for (int i = 0; i < 10000; ++i) {
    const auto job =
        stage(&engine,
              {source(device, memory, 100, false), source(device, memory + 50, 50, true),
               source(device, large, 70000, true)},
              {{device, program}});
    job->hold(device, program);
    const char value = static_cast<char>(i);
    cuda_.enqueue(program, [=] { std::memset(memory, value, 100); });
    job->wait();
    ASSERT_EQ(staged_bytes(*job, 1), std::string(50, i == 0 ? '\0' : static_cast<char>(i - 1)));
    const std::vector<size_t> now = {cuda_.live_events(), cuda_.live_streams(),
                                     cuda_.live_registrations(), engine.arena().held_bytes()};
    if (i == 10) before = now;
    if (i > 10) {
      ASSERT_LE(now[0], before[0] + 16);  // as many as are in use at once
      ASSERT_EQ((std::vector(now.begin() + 1, now.end())),
                (std::vector(before.begin() + 1, before.end())));
    }
  }
  engine.close();
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
}

// Streams take turns in any order; the values are those at the call.
TEST_F(StageCudaTest, AnyOrder) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    cuda_.shuffle(seed);
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const cudaStream_t program = cuda_.make_stream(0);
    std::byte* const memory = on_device(0, "step 0");
    std::byte* const guarded = on_device(0, "step 0");
    for (int step = 1; step < 5; ++step) {
      const std::string now = "step " + std::to_string(step);
      write_later(program, memory, now);
      write_later(program, guarded, now);
      const auto job =
          stage(&engine, {source(device, memory, 6, false), source(device, guarded, 6, true)},
                {{device, program}});
      write_later(program, memory, "broken");
      job->hold(device, program);
      write_later(program, guarded, "broken");
      job->wait();
      ASSERT_EQ(staged_bytes(*job, 0), now);
      ASSERT_EQ(staged_bytes(*job, 1), now);
    }
  }
}

}  // namespace
}  // namespace pyckpt
