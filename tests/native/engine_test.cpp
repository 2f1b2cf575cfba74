// The engine: its limits, closing while jobs run, and a forked child.
#include "engine.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

class EngineTest : public testing::Test {
 protected:
  static EngineOptions small() { return {4096, 2, 2}; }

  static void write(Engine* engine, const std::string& path, const std::string& bytes) {
    const Sample sample = make_sample(nullptr, bytes);
    const auto job = engine->start_write(path, {});
    job->add(nullptr, sample.source);
    job->finish();
  }

  // An item whose copy waits at a gate, so that its job runs until someone opens it.
  struct Held {
    explicit Held(const std::string& bytes) : sample(make_sample(nullptr, bytes)) {
      sample.source.device = std::make_shared<FakeDevice>([this] {
        copying.open();
        leave.wait();
      });
    }
    Gate copying, leave;
    Sample sample;
  };

  TempDirectory directory_;
  const std::string path_ = directory_.file("file");
  Random random_{1};
};

TEST_F(EngineTest, RefusesSenselessOptions) {
  EXPECT_THROW(Engine({0, 1, 1}), std::invalid_argument);
  EXPECT_THROW(Engine({4095, 1, 1}), std::invalid_argument);
  EXPECT_THROW(Engine({4096 + 512, 1, 1}), std::invalid_argument);
  EXPECT_THROW(Engine({4096, 0, 1}), std::invalid_argument);
  EXPECT_THROW(Engine({4096, 1, 0}), std::invalid_argument);
  const Engine engine({8192, 3, 2});
  EXPECT_EQ(engine.options().slot_bytes, 8192u);
  EXPECT_EQ(engine.options().slots, 3u);
  EXPECT_EQ(engine.options().io_threads, 2u);
}

// What the arena has room for, and no more.
TEST_F(EngineTest, PrewarmsInTheBackground) {
  constexpr size_t kSegment = 2 << 20;
  Engine engine({4096, 2, 2, 3 * kSegment});
  for (int times = 0; times < 2; ++times) {
    engine.prewarm_later(size_t{1} << 40, Arena::Kind::kPrivate, {});
    EXPECT_EQ(engine.arena().held_bytes(), 3 * kSegment);
    engine.wait_prewarmed();
  }
  EXPECT_EQ(engine.arena().used_bytes(), 0u);
  const auto region = engine.arena().allocate(3 * kSegment, Arena::Kind::kPrivate);
  ASSERT_NE(region, nullptr);
  std::vector<unsigned char> there(region->size() / 4096);
  ASSERT_EQ(::mincore(region->data(), region->size(), there.data()), 0);
  for (const unsigned char page : there) ASSERT_TRUE(page & 1);
  // Its thread is served after those of the program.
  const auto threads = threads_named("pyckpt-warm");
  ASSERT_EQ(threads.size(), 1u);
  EXPECT_GT(::getpriority(PRIO_PROCESS, static_cast<id_t>(threads[0])),
            ::getpriority(PRIO_PROCESS, 0));
}

// By the program's nice value, whatever that is, and however often it prewarms.
TEST_F(EngineTest, PrewarmingAddsToTheNiceValueOnce) {
  std::thread program([] {
    // On Linux each thread has its own, and those that it makes begin with it.
    ASSERT_EQ(::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + 3), 0);
    const int own = ::getpriority(PRIO_PROCESS, 0);
    Engine engine({4096, 2, 2, 4 << 20});
    for (int times = 0; times < 3; ++times) {
      engine.prewarm_later(2 << 20, Arena::Kind::kPrivate, {});
      engine.wait_prewarmed();
      const auto threads = threads_named("pyckpt-warm");
      ASSERT_EQ(threads.size(), 1u);
      EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(threads[0])), std::min(19, own + 10));
    }
  });
  program.join();
}

// A save finds the same memory, whether it is there yet or not.
TEST_F(EngineTest, PrewarmedMemoryIsTakenMeanwhile) {
  constexpr size_t kSize = 64 << 20;
  Engine engine({4096, 2, 2, 2 * kSize});
  engine.prewarm_later(kSize, Arena::Kind::kPrivate, {});
  const auto region = engine.arena().allocate(kSize, Arena::Kind::kPrivate);
  ASSERT_NE(region, nullptr);
  std::memset(region->data(), 5, region->size());
  engine.wait_prewarmed();
  EXPECT_EQ(engine.arena().held_bytes(), kSize);
  const auto is_kept = [](std::byte byte) { return byte == std::byte{5}; };
  EXPECT_TRUE(std::all_of(region->data(), region->data() + region->size(), is_kept));
}

TEST_F(EngineTest, PrewarmsNothingOnceItIsClosed) {
  Engine engine({4096, 2, 2, 16 << 20});
  engine.prewarm_later(16 << 20, Arena::Kind::kPrivate, {});
  engine.close();
  engine.wait_prewarmed();  // it has ended, done or not
  EXPECT_THROW(engine.prewarm_later(1, Arena::Kind::kPrivate, {}), EngineClosed);
}

// The product is 8192 where 64 bits end, which would be a ring of far too little memory.
TEST_F(EngineTest, RefusesMoreMemoryThanThereIsAddresses) {
  EXPECT_ANY_THROW(Engine({(size_t{1} << 63) + 4096, 2, 1}));
}

TEST_F(EngineTest, Writes) {
  Engine engine(small());
  const std::string bytes = random_bytes(random_, 100001);
  write(&engine, path_, bytes);
  EXPECT_EQ(difference(read_file(path_), bytes), "");
}

TEST_F(EngineTest, AFailedStartLeavesTheEngineFit) {
  Engine engine(small());
  EXPECT_THROW(engine.start_write(directory_.file("missing/file"), {}), IoError);
  write(&engine, path_, "abc");
  EXPECT_THROW(engine.start_write(path_, {}), IoError);
  EXPECT_EQ(read_file(path_), "abc");
}

TEST_F(EngineTest, CudaNeedsABuildWithIt) {
#ifndef PYCKPT_CUDA
  Engine engine(small());
  EXPECT_THROW(engine.cuda_device(0), CudaError);
#endif
}

TEST_F(EngineTest, AClosedEngineStartsNothing) {
  Engine engine(small());
  EXPECT_FALSE(engine.closed());
  engine.close();
  engine.close();
  EXPECT_TRUE(engine.closed());
  EXPECT_THROW(engine.start_write(path_, {}), EngineClosed);
  EXPECT_FALSE(exists(path_));
}

TEST_F(EngineTest, CloseFailsAJobThatRunsAndJoins) {
  Engine engine(small());
  Held held(random_bytes(random_, 20000));
  auto job = engine.start_write(path_, {});
  job->add(nullptr, held.sample.source);
  std::atomic<bool> closed{false};
  held.copying.wait();
  std::thread closer([&] {
    engine.close();
    closed = true;
  });
  // Error and gate in this order: the job fails while a copy is under way, which close waits for.
  while (!engine.closed()) std::this_thread::yield();
  EXPECT_THROW(
      {
        for (int i = 0; i < 10000; ++i) {
          if (!job->add(nullptr, held.sample.source)) job->wait_for_room();
        }
      },
      EngineClosed);
  EXPECT_FALSE(closed.load());
  held.leave.open();
  closer.join();
  EXPECT_TRUE(threads_named("pyckpt-io").empty());
  EXPECT_THROW(job->finish(), EngineClosed);
  EXPECT_THROW(job->finish(), EngineClosed);
  job->wait_for_room();  // does not hang
  job.reset();
  EXPECT_FALSE(exists(path_));
}

TEST_F(EngineTest, CloseWakesAFeederThatWaits) {
  Engine engine({4096, 2, 1});
  Held held(random_bytes(random_, 4096));
  const auto job = engine.start_write(path_, {});
  job->add(nullptr, held.sample.source);
  held.copying.wait();  // from here on nothing leaves the queue
  int added = 0;
  while (added < 100 && job->add(nullptr, held.sample.source)) ++added;
  ASSERT_LT(added, 100);
  std::thread feeder([&] {
    job->wait_for_room();
    EXPECT_THROW(job->finish(), EngineClosed);
  });
  std::thread closer([&] { engine.close(); });
  feeder.join();
  held.leave.open();
  closer.join();
}

TEST_F(EngineTest, CloseWakesAFeederThatFinishes) {
  Engine engine(small());
  Held held(random_bytes(random_, 4096));
  const auto job = engine.start_write(path_, {});
  job->add(nullptr, held.sample.source);
  held.copying.wait();
  std::thread feeder([&] { EXPECT_THROW(job->finish(), EngineClosed); });
  std::thread closer([&] { engine.close(); });
  while (!engine.closed()) std::this_thread::yield();
  held.leave.open();
  feeder.join();
  closer.join();
}

TEST_F(EngineTest, CloseFailsAJobThatWaitsForItsThreads) {
  Engine engine(small());
  Held held(random_bytes(random_, 8192));  // both threads
  const auto first = engine.start_write(path_, {});
  first->add(nullptr, held.sample.source);
  held.copying.wait();
  const auto second = engine.start_write(directory_.file("second"), {});
  const Sample sample = make_sample(nullptr, random_bytes(random_, 50000));
  second->add(nullptr, sample.source);
  std::thread closer([&] { engine.close(); });
  EXPECT_THROW(second->finish(), EngineClosed);
  held.leave.open();
  closer.join();
  EXPECT_THROW(first->finish(), EngineClosed);
}

TEST_F(EngineTest, CloseAfterAJobsEndChangesNothing) {
  Engine engine(small());
  const Sample sample = make_sample(nullptr, "abc");
  auto job = engine.start_write(path_, {});
  job->add(nullptr, sample.source);
  job->finish();
  engine.close();
  EXPECT_EQ(job->items().size(), 1u);
  job.reset();
  EXPECT_EQ(read_file(path_), "abc");
}

// A feeder that was dropped has failed, whatever for; nothing of its job may stay.
TEST_F(EngineTest, ADroppedJobIsAbandoned) {
  Engine engine(small());
  engine.start_write(path_, {}).reset();
  EXPECT_FALSE(exists(path_));
}

TEST_F(EngineTest, ADroppedJobIsAbandonedAtCloseAtTheLatest) {
  {
    Engine engine(small());
    engine.start_write(path_, {}).reset();
  }
  EXPECT_FALSE(exists(path_));
}

// "A job that starts while others run gets threads as those run out of work."
TEST_F(EngineTest, AJobWithoutWorkHoldsNoOneUp) {
  Engine engine(small());
  const auto idle = engine.start_write(directory_.file("idle"), {});
  const bool ended = returns([&] { write(&engine, path_, "abc"); }, [&] { idle->abandon(); });
  EXPECT_TRUE(ended) << "the second job got no thread until the first was gone";
  idle->abandon();
}

TEST_F(EngineTest, JobsFromManyThreads) {
  Engine engine({8192, 3, 2});
  std::vector<std::string> files(6);
  for (std::string& bytes : files) bytes = random_bytes(random_, draw(random_, 1, 300000));
  parallelize(files.size(), [&](size_t i) {
    for (int round = 0; round < 5; ++round) {
      write(&engine, directory_.file(std::to_string(i) + "-" + std::to_string(round)), files[i]);
    }
  });
  for (size_t i = 0; i < files.size(); ++i) {
    for (int round = 0; round < 5; ++round) {
      const std::string name = std::to_string(i) + "-" + std::to_string(round);
      EXPECT_EQ(difference(read_file(directory_.file(name)), files[i]), "");
    }
  }
}

TEST_F(EngineTest, StartingAndClosingRace) {
  for (int round = 0; round < 30; ++round) {
    Engine engine(small());
    std::atomic<int> written{0}, refused{0};
    parallelize(4, [&](size_t i) {
      if (i == 0) return engine.close();
      const std::string name = std::to_string(round) + "-" + std::to_string(i);
      try {
        write(&engine, directory_.file(name), "abc");
        ++written;
      } catch (const EngineClosed&) {
        ++refused;
      }
    });
    EXPECT_EQ(written + refused, 3);
  }
}

TEST_F(EngineTest, AForkedChildMayNotUseIt) {
  Engine engine(small());
  const int status = in_child([&] {
    try {
      engine.start_write(path_, {});
    } catch (const EngineClosed&) {
      return 7;
    }
    return 1;
  });
  EXPECT_EQ(status, 7);
  EXPECT_FALSE(exists(path_));
  write(&engine, path_, "abc");  // the parent goes on
}

// Its thread is in the parent, so that what it has to do would never be done.
TEST_F(EngineTest, AForkedChildMayNotWaitUntilItIsPrewarmed) {
  Engine engine(small());
  const int status = in_child([&] {
    try {
      engine.wait_prewarmed();
    } catch (const EngineClosed&) {
      return 7;
    }
    return 1;
  });
  EXPECT_EQ(status, 7);
  engine.wait_prewarmed();
}

TEST_F(EngineTest, AForkedChildMayDestroyIt) {
  auto engine = std::make_unique<Engine>(small());
  Held held(random_bytes(random_, 4096));
  const auto job = engine->start_write(path_, {});
  job->add(nullptr, held.sample.source);
  held.copying.wait();  // a thread is in the middle of its work
  const int status = in_child([&] {
    engine.reset();
    return 7;
  });
  EXPECT_EQ(status, 7);
  held.leave.open();
  job->finish();
  EXPECT_EQ(read_file(path_), held.sample.payload);
}

// As a handler at exit would, which the child inherits.
TEST_F(EngineTest, AForkedChildMayCloseIt) {
  Engine engine(small());
  const int status = in_child([&] {
    engine.close();
    return 7;
  });
  EXPECT_EQ(status, 7);
  write(&engine, path_, "abc");
}

// The file is the parent's.
TEST_F(EngineTest, AForkedChildThatAbandonsAJobDoesNoHarm) {
  Engine engine(small());
  Held held(random_bytes(random_, 4096));
  const auto job = engine.start_write(path_, {});
  job->add(nullptr, held.sample.source);
  held.copying.wait();
  const int status = in_child([&] {
    job->abandon();
    return 7;
  });
  EXPECT_EQ(status, 7);
  EXPECT_TRUE(exists(path_));
  held.leave.open();
  job->abandon();
}

TEST_F(EngineTest, AForkedChildThatAbandonsAnIdleJobLeavesItsFile) {
  Engine engine(small());
  const auto job = engine.start_write(path_, {});
  const int status = in_child([&] {
    job->abandon();
    return 7;
  });
  EXPECT_EQ(status, 7);
  EXPECT_TRUE(exists(path_));
  job->abandon();
}

}  // namespace
}  // namespace pyckpt
