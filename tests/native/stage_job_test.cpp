// Staging of host memory: the values at the call, their checksums, and that nobody waits for ever.
#include "stage_job.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"
#include "engine.h"
#include "error.h"
#include "stream_copy.h"
#include "support.h"
#include "transfer_batch.h"

namespace pyckpt {
namespace {

using namespace test;

class StageJobTest : public testing::Test {
 protected:
  static StageSource source(const std::string& bytes, bool guarded) {
    StageSource source;
    source.data = reinterpret_cast<const std::byte*>(bytes.data());
    source.size = bytes.size();
    source.guarded = guarded;
    return source;
  }

  static std::string staged_bytes(const Staged& staged) {
    return {reinterpret_cast<const char*>(staged.data()), staged.size()};
  }

  static Source staged_source(const std::shared_ptr<Staged>& staged) {
    Source source;
    source.data = staged->data();
    source.size = staged->size();
    source.staged = staged;
    return source;
  }

  static StageSource source(const StoppingMemory& memory, bool guarded) {
    StageSource source;
    source.data = memory.data();
    source.size = memory.size();
    source.guarded = guarded;
    return source;
  }

  static EngineOptions small() { return {4096, 2, 2, 32 << 20}; }

  Random random_{3};
  TempDirectory directory_;
};

TEST_F(StageJobTest, AllSizesHaveTheirBytesAndChecksums) {
  Engine engine(small());
  std::vector<std::string> states;
  std::vector<StageSource> sources;
  for (const size_t size : {0, 1, 63, 64, 65, 4095, 4096, 4097, 7919, (64 << 10) - 1, 64 << 10,
                            (128 << 10) + 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 7919}) {
    states.push_back(random_bytes(random_, size));
  }
  for (size_t i = 0; i < states.size(); ++i) sources.push_back(source(states[i], i % 2 == 0));
  const auto job = engine.start_stage(sources, {});
  job->wait();
  uint64_t total = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    Staged& staged = *job->staged()[i];
    staged.wait();
    EXPECT_TRUE(staged.checksummed);
    EXPECT_EQ(difference(staged_bytes(staged), states[i]), "");
    EXPECT_EQ(staged.crc(), crc32(0, states[i].data(), states[i].size())) << states[i].size();
    total += states[i].size();
  }
  EXPECT_EQ(job->statistics().bytes_staged, total);
  EXPECT_EQ(job->statistics().bytes_streamed, 0u);
}

TEST_F(StageJobTest, StridedSourcesAreMadeContiguous) {
  Engine engine(small());
  for (const int64_t rows : {3, 257, 1500}) {
    const std::string memory = random_bytes(random_, static_cast<size_t>(rows * 300 * 4));
    std::string expected;  // the transpose
    for (int64_t column = 0; column < 300; ++column) {
      for (int64_t row = 0; row < rows; ++row)
        expected += memory.substr((row * 300 + column) * 4, 4);
    }
    StageSource strided = source(memory, false);
    strided.strided = std::make_shared<Strided>(std::vector<int64_t>{300, rows},
                                                std::vector<int64_t>{1, 300}, size_t{4});
    const auto job = engine.start_stage({strided}, {});
    job->wait_volatile();
    EXPECT_EQ(difference(staged_bytes(*job->staged()[0]), expected), "");
    EXPECT_EQ(job->staged()[0]->crc(), crc32(0, expected.data(), expected.size()));
  }
}

// What is not guarded may change after wait_volatile, the rest after wait_host; all the while other
// jobs run.
TEST_F(StageJobTest, OverwrittenRightAfterItsWait) {
  Engine engine({4096, 2, 2, 64 << 20});
  parallelize(3, [&](size_t thread) {
    Random random(thread);
    for (int round = 0; round < 10; ++round) {
      std::vector<std::string> states, expected;
      for (int i = 0; i < 20; ++i) {
        states.push_back(random_bytes(random, draw(random, 1, i < 2 ? 3 << 20 : 100000)));
      }
      expected = states;
      std::vector<StageSource> sources;
      for (size_t i = 0; i < states.size(); ++i) sources.push_back(source(states[i], i % 2 == 0));
      const auto job = engine.start_stage(sources, {});
      job->wait_volatile();
      for (size_t i = 1; i < states.size(); i += 2) states[i].assign(states[i].size(), '!');
      job->wait_host();
      for (size_t i = 0; i < states.size(); i += 2) states[i].assign(states[i].size(), '!');
      for (size_t i = 0; i < states.size(); ++i) {
        const auto& staged = job->staged()[i];
        if (!staged) continue;  // three states may not fit
        staged->wait();
        EXPECT_EQ(difference(staged_bytes(*staged), expected[i]), "");
        EXPECT_EQ(staged->crc(), crc32(0, expected[i].data(), expected[i].size()));
      }
    }
  });
  engine.close();  // whose threads may have held the jobs last
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
}

TEST_F(StageJobTest, TheSameMemoryIsCopiedOnce) {
  Engine engine(small());
  const std::string state = random_bytes(random_, 100000);
  StageSource part = source(state, false);
  part.size = 10;
  StageSource strided = source(state, false);
  strided.size = 10;
  strided.strided =
      std::make_shared<Strided>(std::vector<int64_t>{10}, std::vector<int64_t>{2}, size_t{1});
  const auto job =
      engine.start_stage({source(state, true), source(state, false), part, strided}, {});
  job->wait();
  EXPECT_EQ(job->staged()[0], job->staged()[1]);
  EXPECT_EQ(staged_bytes(*job->staged()[2]), state.substr(0, 10));
  EXPECT_EQ(staged_bytes(*job->staged()[3])[1], state[2]);
  EXPECT_EQ(job->statistics().bytes_staged, 100020u);
}

TEST_F(StageJobTest, WhatFindsNoRoomIsLeftOut) {
  Engine engine({4096, 2, 2, 2 << 20});
  const std::string large = random_bytes(random_, 3 << 20);
  const std::string fits = random_bytes(random_, 1 << 20);
  const std::string small = "abc";
  const auto job = engine.start_stage(
      {source(large, false), source(fits, true), source(small, true), StageSource()}, {});
  job->wait();
  EXPECT_EQ(job->staged()[0], nullptr);
  EXPECT_EQ(staged_bytes(*job->staged()[1]), fits);
  EXPECT_EQ(staged_bytes(*job->staged()[2]), small);
  EXPECT_EQ(job->staged()[3], nullptr);
  EXPECT_EQ(job->statistics().bytes_streamed, large.size());

  Engine none({4096, 2, 2, 0});
  const auto streamed = none.start_stage({source(small, false), source(fits, false)}, {});
  streamed->wait();
  EXPECT_EQ(streamed->staged()[0], nullptr);
  EXPECT_EQ(streamed->statistics().bytes_streamed, small.size() + fits.size());
  EXPECT_EQ(streamed->statistics().bytes_staged, 0u);
}

TEST_F(StageJobTest, WhoWaitsHelps) {
  Engine engine({4096, 1, 1, 32 << 20});
  // The one thread that stages is busy until the reader is let go on.
  StoppingMemory slow(1);
  const auto before = engine.start_stage({source(slow, true)}, {});
  slow.wait_for_reader();
  const std::string state = random_bytes(random_, 5 << 20);
  const std::string other = random_bytes(random_, 3000);
  const auto job = engine.start_stage({source(state, true), source(other, false)}, {});
  EXPECT_TRUE(returns([&] { job->wait_volatile(); }, [&] { slow.let_go_on(); }));
  EXPECT_TRUE(returns([&] { job->wait_host(); }, [&] { slow.let_go_on(); }));
  EXPECT_EQ(difference(staged_bytes(*job->staged()[0]), state), "");
  slow.let_go_on();
  before->wait();
}

// The threads that write are with the disk for as long as that takes, and take nothing else on.
TEST_F(StageJobTest, NothingWaitsForTheDisk) {
  Engine engine({4096, 2, 2, 32 << 20});
  Gate leave;
  std::atomic<int> arrived{0};
  Gate busy;
  const auto disk = std::make_shared<FakeDevice>([&] {
    if (arrived.fetch_add(1) + 1 == 2) busy.open();
    leave.wait();
  });
  const auto write = engine.start_write(directory_.file("a"), {Direct::kAuto, false, 0});
  std::vector<Sample> windows;
  for (int i = 0; i < 6; ++i) {
    windows.push_back(make_sample(nullptr, std::string(4096, 'x')));
    windows.back().source.device = disk;
    write->add(nullptr, windows.back().source);
  }
  busy.wait();
  const std::string state = random_bytes(random_, 5 << 20);
  const std::string other = random_bytes(random_, 3000);
  const auto device = std::make_shared<FakeDevice>();
  StageSource on_device = source(other, true);
  on_device.device = device;
  StageJob::Options options;
  options.programs = {{device, nullptr}};
  const auto job = engine.start_stage({source(state, true), on_device}, std::move(options));
  EXPECT_TRUE(returns([&] { job->hold(device, nullptr); }, [&] { leave.open(); }));
  // Whoever waits so does not help.
  EXPECT_TRUE(returns([&] { job->wait(); }, [&] { leave.open(); }));
  EXPECT_EQ(difference(staged_bytes(*job->staged()[0]), state), "");
  leave.open();
  write->finish();
}

TEST_F(StageJobTest, WritersOfStagedStatesDoNotLockUp) {
  for (const size_t threads : {1, 2, 4}) {
    Engine engine({4096, 2, threads, 64 << 20});
    parallelize(3, [&](size_t thread) {
      Random random(thread);
      for (int round = 0; round < 5; ++round) {
        std::vector<Sample> samples;
        std::vector<StageSource> sources;
        for (const size_t size : {0, 1, 5000, 70000, 1 << 20, (2 << 20) + 13}) {
          Sample sample =
              make_sample(make_envelope(random, 100, 50, size), random_bytes(random, size));
          StageSource source;
          source.data = sample.source.data;
          source.size = size;
          source.guarded = size % 2 == 0;
          sources.push_back(source);
          samples.push_back(std::move(sample));
        }
        const std::string path = directory_.file(std::to_string(thread) + std::to_string(round) +
                                                 std::to_string(threads));
        const auto staging = engine.start_stage(sources, {});
        const auto job = engine.start_write(path, {Direct::kAuto, false, 0});
        for (size_t i = 0; i < samples.size(); ++i) {
          samples[i].source = staged_source(staging->staged()[i]);
          job->add(samples[i].envelope, samples[i].source);
        }
        ASSERT_TRUE(
            returns([&] { job->finish(); },
                    [&] { job->fail(std::make_exception_ptr(std::runtime_error("hung"))); }));
        std::vector<Place> places;
        ASSERT_EQ(difference(read_file(path), reference_file(samples, &places)), "");
        for (size_t i = 0; i < samples.size(); ++i) ASSERT_EQ(job->items()[i].crc, places[i].crc);
      }
    });
  }
}

TEST_F(StageJobTest, SourcesAndRegionsAreLetGoOf) {
  Engine engine(small());
  const auto owner = std::make_shared<std::string>(random_bytes(random_, 200000));
  StageJob::Options options;
  options.sources = owner;
  auto job = engine.start_stage({source(*owner, true)}, std::move(options));
  EXPECT_EQ(owner.use_count(), 2);
  job->wait();
  job->release_sources();
  EXPECT_EQ(owner.use_count(), 1);
  const std::shared_ptr<Staged> staged = job->staged()[0];
  EXPECT_GT(engine.arena().used_bytes(), 0u);
  job->release_regions();
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
  job->release_regions();
  job.reset();
  EXPECT_EQ(staged->size(), owner->size());  // the memory is mapped still
  staged->wait();
}

TEST_F(StageJobTest, AClosedEngineFailsItsJobs) {
  Engine engine(small());
  const std::string state = "state";
  const auto job = engine.start_stage({source(state, true)}, {});
  engine.close();
  EXPECT_THROW(job->wait(), EngineClosed);
  EXPECT_THROW(engine.start_stage({source(state, true)}, {}), EngineClosed);
}

// A thread is in the middle of a source when the job fails, and what holds the sources lets go.
TEST_F(StageJobTest, SourcesStayWhileTheyAreRead) {
  Engine engine({4096, 1, 1, 32 << 20});
  StoppingMemory memory(4);
  const auto owner = std::make_shared<int>(0);
  StageJob::Options options;
  options.sources = owner;
  const auto job = engine.start_stage({source(memory, true)}, std::move(options));
  memory.wait_for_reader();
  job->fail(std::make_exception_ptr(EngineClosed("closed")));
  EXPECT_THROW(job->wait(), EngineClosed);
  std::promise<pid_t> thread;
  std::atomic<bool> released{false};
  Gate leave;
  auto release = std::async(std::launch::async, [&] {
    thread.set_value(static_cast<pid_t>(::syscall(SYS_gettid)));
    job->release_sources();
    released = true;
    leave.wait();
  });
  wait_until_asleep(thread.get_future().get());
  EXPECT_FALSE(released);
  EXPECT_EQ(owner.use_count(), 2);
  memory.let_go_on();
  leave.open();
  release.get();
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_EQ(memory.stops(), 1);  // what nobody had begun with is passed over
  EXPECT_THROW(job->staged()[0]->wait(), EngineClosed);
}

// The same with the engine closed, as `configure` and an exit do.
TEST_F(StageJobTest, AnEngineMayCloseWhileSourcesAreRead) {
  Engine engine({4096, 1, 1, 32 << 20});
  StoppingMemory memory(4);
  const auto job = engine.start_stage({source(memory, true)}, {});
  memory.wait_for_reader();
  auto close = std::async(std::launch::async, [&] { engine.close(); });
  EXPECT_THROW(job->wait(), EngineClosed);
  memory.let_go_on();
  EXPECT_TRUE(returns([&] { job->release_sources(); }, [] {}));
  close.get();
  EXPECT_EQ(memory.stops(), 1);
}

// Bytes that were read while the program could write are nobody's.
TEST_F(StageJobTest, WhatWasReadBesideAFailureIsNotThere) {
  Engine engine({4096, 1, 1, 32 << 20});
  StoppingMemory memory(1);
  const auto job = engine.start_stage({source(memory, true)}, {});
  memory.wait_for_reader();
  job->fail(std::make_exception_ptr(CudaError("the guard could not be set")));
  memory.let_go_on();
  job->release_sources();  // the thread has done its unit
  EXPECT_THROW(job->staged()[0]->wait(), CudaError);
  EXPECT_THROW(job->check(), CudaError);
}

TEST_F(StageJobTest, AHoldThatFailsFailsTheJob) {
  class Refusing : public FakeDevice {
    void hold(Stream, const Ticket&) override { throw CudaError("cudaStreamWaitEvent failed"); }
  };
  Engine engine(small());
  const std::string state = "state";
  const auto device = std::make_shared<Refusing>();
  for (const bool guarded : {false, true}) {
    StageSource bad = source(state, guarded);
    bad.device = device;
    StageJob::Options options;
    options.programs = {{device, nullptr}};
    if (!guarded) {
      EXPECT_THROW(engine.start_stage({bad}, std::move(options)), CudaError);
      continue;
    }
    const auto job = engine.start_stage({bad, source(state, true)}, std::move(options));
    EXPECT_NO_THROW(job->check());
    EXPECT_THROW(job->hold(device, nullptr), CudaError);
    EXPECT_THROW(job->check(), CudaError);
    EXPECT_THROW(job->wait(), CudaError);
    EXPECT_THROW(job->staged()[0]->wait(), CudaError);
  }
}

TEST_F(StageJobTest, SharedMemory) {
  Engine engine(small());
  const std::string state = random_bytes(random_, 5000);
  StageJob::Options options;
  options.kind = Arena::Kind::kShared;
  const auto job = engine.start_stage({source(state, false)}, std::move(options));
  job->wait();
  EXPECT_GE(job->staged()[0]->region()->descriptor(), 0);
}

TEST_F(StageJobTest, ADevicesErrorArrives) {
  Engine engine(small());
  const std::string state = "state";
  const auto device = std::make_shared<FakeDevice>([] { throw CudaError("the device is gone"); });
  for (const bool guarded : {false, true}) {
    StageSource bad = source(state, guarded);
    bad.device = device;
    StageJob::Options options;
    options.programs = {{device, nullptr}};
    const auto job = engine.start_stage({bad}, std::move(options));
    EXPECT_THROW(job->wait(), CudaError);
    EXPECT_THROW(job->wait_host(), CudaError);
    EXPECT_THROW(job->staged()[0]->wait(), CudaError);
  }
}

TEST(StreamCopyTest, AllSizesAndAlignments) {
  Random random(9);
  for (const size_t size :
       {0, 1, 15, 63, 64, 65, 4095, 4096, 4097, 4159, 4160, 7919, 131072, 131073}) {
    for (const size_t to_shift : {0, 1, 15, 16, 17}) {
      for (const size_t from_shift : {0, 1, 8, 16}) {
        const std::string bytes = random_bytes(random, size);
        const Memory from(bytes, from_shift);
        Memory to(std::string(size + 1, '?'), to_shift);
        copy_past_cache(const_cast<std::byte*>(to.data), from.data, size);
        const std::string got(reinterpret_cast<const char*>(to.data), size + 1);
        ASSERT_EQ(difference(got, bytes + "?"), "") << size << " " << to_shift << " " << from_shift;
      }
    }
  }
}

// All copies are over when it throws, those beside the one that failed, too.
TEST(TransferBatchTest, WaitsForAllAlthoughOneFails) {
  int calls = 0;
  FakeDevice good([&] { ++calls; });
  FakeDevice bad([] { throw CudaError("the device is gone"); });
  const std::string from = "abcdef";
  std::string to(6, '?');
  const auto transfer = [&](size_t at) {
    return Transfer{reinterpret_cast<std::byte*>(&to[at]),
                    reinterpret_cast<const std::byte*>(&from[at]), 1};
  };
  TransferBatch batch;
  EXPECT_TRUE(batch.empty());
  batch.add(&bad, transfer(0));
  batch.add(&good, transfer(1));
  batch.add(&bad, transfer(2));
  batch.add(&good, transfer(3));
  EXPECT_FALSE(batch.empty());
  batch.start_to_host();
  EXPECT_THROW(batch.wait(), CudaError);
  EXPECT_EQ(to, "?b?d??");
  EXPECT_EQ(calls, 1);  // in one go
  EXPECT_TRUE(batch.empty());
  batch.add(&good, transfer(5));
  batch.start_from_host();
  batch.wait();
  EXPECT_EQ(to, "?b?d?f");
}

// A device that refuses a copy at once.
TEST(TransferBatchTest, WaitsForAllAlthoughOneIsRefused) {
  class Refusing : public FakeDevice {
    std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>&) override {
      throw CudaError("refused");
    }
  } bad;
  FakeDevice good;
  char from = 'x', to = '?';
  TransferBatch batch;
  const Transfer transfer{reinterpret_cast<std::byte*>(&to), reinterpret_cast<std::byte*>(&from),
                          1};
  batch.add(&good, transfer);
  batch.add(&bad, transfer);
  EXPECT_THROW(batch.start_to_host(), CudaError);
  EXPECT_EQ(to, 'x');
  EXPECT_TRUE(batch.empty());
}

}  // namespace
}  // namespace pyckpt
