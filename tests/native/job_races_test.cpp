// Jobs that are failed, ended and worked for at the same time, at instants that differ each round:
// nobody waits for ever, nobody gets wrong bytes, and nobody touches memory afterwards.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "peer_job.h"
#include "read_job.h"
#include "stream_job.h"
#include "support.h"
#include "write_job.h"

namespace pyckpt {
namespace {

using namespace test;

constexpr size_t kSlot = 4096;
constexpr size_t kThreads = 3;

class JobRacesTest : public testing::Test {
 protected:
  JobRacesTest() {
    for (const size_t size : {size_t{100}, 5 * kSlot, size_t{1}, 3 * kSlot + 7}) {
      const auto envelope = make_envelope(random_, 100, 50, size);
      samples_.push_back(make_sample(envelope, random_bytes(random_, size)));
    }
    std::vector<Place> places;
    expected_ = reference_file(samples_, &places);
  }

  // For about as long as a job takes, and another time each round.
  void spin() {
    const uint64_t times = draw(random_, 0, 1 << draw(random_, 0, 17));
    for (volatile uint64_t i = 0; i < times; i = i + 1) {
    }
  }

  // Calls `f` while another thread fails the job, or just after it. Returns whether `f` threw
  // nothing.
  bool beside_a_failure(Job* job, const std::function<void()>& f) {
    const bool is_late = draw(random_, 0, 7) == 0;
    Gate begun, over;
    bool is_good = false;
    std::thread failing([&] {
      begun.wait();
      is_late ? over.wait() : spin();
      job->fail(std::make_exception_ptr(std::runtime_error("failed")));
    });
    const auto call = [&] {
      begun.open();
      try {
        f();
        is_good = true;
      } catch (const std::runtime_error&) {
      }
    };
    const auto rescue = [&] { job->fail(std::make_exception_ptr(std::runtime_error("hung"))); };
    EXPECT_TRUE(returns(call, rescue));
    over.open();
    failing.join();
    return is_good;
  }

  void feed(FillJob* job) {
    for (const Sample& sample : samples_) job->add(sample.envelope, sample.source);
  }

  // Nobody writes there from here on: also no thread that came late.
  void expect_left_alone(std::string* memory) {
    memory->assign(memory->size(), 'x');
    struct Idle {
      std::atomic<size_t> threads{0};
      Gate all;
    };
    const auto idle = std::make_shared<Idle>();
    for (size_t i = 0; i < kThreads; ++i) {
      threads_.submit([idle] {
        if (++idle->threads == kThreads) idle->all.open();
        idle->all.wait();
      });
    }
    idle->all.wait();
    EXPECT_EQ(memory->find_first_not_of('x'), std::string::npos);
  }

  Random random_{3};
  SlotRing ring_{2, kSlot};
  IoThreads threads_{kThreads};
  TempDirectory directory_;
  std::vector<Sample> samples_;
  std::string expected_;
};

TEST_F(JobRacesTest, AStreamThatIsTaken) {
  int good = 0;
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    StreamJob job(&ring_);
    std::string taken;
    bool is_over = false;
    std::thread taking([&] {
      try {
        while (const size_t size = job.next_size()) {
          std::string window(size, '\xff');
          job.take(reinterpret_cast<std::byte*>(window.data()));
          taken += window;
        }
        is_over = true;
      } catch (const std::runtime_error&) {
      }
    });
    const bool finishes = round % 2 == 0;
    const bool is_good = beside_a_failure(&job, [&] {
      feed(&job);
      finishes ? job.finish() : job.abandon();
    });
    taking.join();
    EXPECT_EQ(difference(taken, expected_.substr(0, taken.size())), "");
    if (finishes && is_good) {
      EXPECT_EQ(taken.size(), expected_.size());
      ++good;
    }
    EXPECT_TRUE(finishes || !is_over);
  }
  EXPECT_GT(good, 0);
}

TEST_F(JobRacesTest, AWrite) {
  const std::string path = directory_.file("file");
  int good = 0;
  for (int round = 0; round < 150 && !HasFailure(); ++round) {
    const auto job = WriteJob::start(&ring_, &threads_, path, {Direct::kOff, false, 0});
    const bool finishes = round % 4 != 0;
    const bool is_good = beside_a_failure(job.get(), [&] {
      feed(job.get());
      finishes ? job->finish() : job->abandon();
    });
    if (finishes && is_good) {
      EXPECT_EQ(difference(read_file(path), expected_), "");
      ::unlink(path.c_str());
      ++good;
    }
    job->abandon();
    EXPECT_FALSE(exists(path));
  }
  EXPECT_GT(good, 0);
}

TEST_F(JobRacesTest, ARead) {
  const std::string path = directory_.file("file");
  const std::string bytes = random_bytes(random_, 40 * kSlot);
  std::ofstream(path, std::ios::binary) << bytes;
  std::string memory(bytes.size(), '\0');
  int good = 0;
  for (int round = 0; round < 150 && !HasFailure(); ++round) {
    const auto job = std::make_shared<ReadJob>(&ring_, &threads_, Direct::kOff, round % 2 == 0);
    job->add_file(path);
    for (size_t at = 0; at < bytes.size(); at += bytes.size() / 4) {
      auto* const to = reinterpret_cast<std::byte*>(memory.data() + at);
      job->add(0, at, bytes.size() / 4, {to, nullptr, nullptr});
    }
    if (beside_a_failure(job.get(), [&] { job->run(); })) {
      EXPECT_EQ(difference(memory, bytes), "");
      ++good;
    }
    expect_left_alone(&memory);
  }
  EXPECT_GT(good, 0);
}

TEST_F(JobRacesTest, ACopyFromAPeer) {
  constexpr size_t kRange = 64;
  const std::string bytes = random_bytes(random_, 4096 * kRange);  // of units with 512 ranges each
  std::string memory(bytes.size(), '\0');
  int good = 0;
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    const auto job = std::make_shared<PeerJob>(&threads_);
    for (size_t at = 0; at < bytes.size(); at += kRange) {
      job->add(::getpid(), reinterpret_cast<uintptr_t>(bytes.data() + at),
               reinterpret_cast<std::byte*>(memory.data() + at), kRange);
    }
    if (beside_a_failure(job.get(), [&] { job->run(); })) {
      EXPECT_EQ(difference(memory, bytes), "");
      ++good;
    }
    expect_left_alone(&memory);
  }
  EXPECT_GT(good, 0);
}

}  // namespace
}  // namespace pyckpt
