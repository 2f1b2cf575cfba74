// Jobs whose bytes are taken: all of them, in their order, and that nothing hangs.
#include "stream_job.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

constexpr size_t kSlot = 8192;

// Takes all bytes there are, in a thread of its own.
class Taker {
 public:
  explicit Taker(StreamJob* job) : thread_([this, job] { run(job); }) {}
  ~Taker() {
    if (thread_.joinable()) thread_.join();
  }

  const std::string& bytes() {
    thread_.join();
    return bytes_;
  }
  bool failed() {
    thread_.join();
    return failed_;
  }

 private:
  void run(StreamJob* job) {
    try {
      while (const size_t size = job->next_size()) {
        std::string window(size, '\xff');
        job->take(reinterpret_cast<std::byte*>(window.data()));
        bytes_ += window;
      }
    } catch (const std::exception&) {
      failed_ = true;
    }
  }

  std::string bytes_;
  bool failed_ = false;
  std::thread thread_;
};

class StreamJobTest : public testing::Test {
 protected:
  void check(const std::vector<Sample>& samples) {
    StreamJob job(&ring_);
    Taker taker(&job);
    ASSERT_TRUE(returns(
        [&] {
          for (const Sample& sample : samples) {
            if (!job.add(sample.envelope, sample.source)) job.wait_for_room();
          }
          job.finish();
        },
        [&] { job.fail(std::make_exception_ptr(std::runtime_error("it hung"))); }));
    std::vector<Place> places;
    const std::string expected = reference_file(samples, &places);
    ASSERT_EQ(difference(taker.bytes(), expected), "");
    ASSERT_EQ(job.items().size(), samples.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(job.items()[i].offset, places[i].offset) << "item " << i;
      EXPECT_EQ(job.items()[i].crc.load(), places[i].crc) << "item " << i;
    }
    EXPECT_EQ(job.statistics().bytes_written, expected.size());
    EXPECT_EQ(job.consumed(), samples.size());
  }

  SlotRing ring_{2, kSlot};
  Random random_{1};
};

TEST_F(StreamJobTest, NothingIsNoBytes) { check({}); }

TEST_F(StreamJobTest, SizesThatHurt) {
  std::vector<Sample> samples;
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, kSlot - 1, kSlot, kSlot + 1,
        size_t{7919}, size_t{65536}, size_t{65537}, size_t{1} << 20}) {
    // With an envelope the suffix has the checksum of bytes that were taken before it.
    const auto envelope = make_envelope(random_, 100, 100, size);
    samples.push_back(make_sample(envelope, random_bytes(random_, size)));
    samples.push_back(make_sample(nullptr, random_bytes(random_, size), 1));
    Sample on_device = make_sample(envelope, random_bytes(random_, size));
    on_device.source.device = std::make_shared<FakeDevice>();
    samples.push_back(on_device);
  }
  check(samples);
}

TEST_F(StreamJobTest, WhatIsNotTakenIsNotMade) {
  StreamJob job(&ring_);
  const Sample sample = make_sample(nullptr, random_bytes(random_, 10 * kSlot));
  job.add(sample.envelope, sample.source);
  EXPECT_EQ(job.statistics().bytes_written, 0u);
  EXPECT_EQ(job.consumed(), 0u);
  std::string window(job.next_size(), 'x');
  job.take(reinterpret_cast<std::byte*>(window.data()));
  EXPECT_EQ(job.statistics().bytes_written, window.size());
}

TEST_F(StreamJobTest, AFailureWakesWhoWaits) {
  StreamJob job(&ring_);
  Taker taker(&job);
  job.fail(std::make_exception_ptr(std::runtime_error("the store is full")));
  EXPECT_TRUE(taker.failed());
  EXPECT_THROW(job.finish(), std::runtime_error);
}

TEST_F(StreamJobTest, AbandonWakesTheTaker) {
  StreamJob job(&ring_);
  const Sample sample = make_sample(nullptr, random_bytes(random_, 10 * kSlot));
  job.add(sample.envelope, sample.source);
  Taker taker(&job);
  job.abandon();
  job.abandon();
  EXPECT_TRUE(taker.failed());
}

// A job that is abandoned waits for the window that is being taken. It waited for ever where it was
// abandoned between the taking of a window and the look at whether the job had failed.
TEST_F(StreamJobTest, AbandonAtAnyInstantOfATake) {
  const Sample sample = make_sample(nullptr, random_bytes(random_, 4 * kSlot));
  for (int round = 0; round < 20000; ++round) {
    StreamJob job(&ring_);
    job.add(sample.envelope, sample.source);
    Taker taker(&job);
    ASSERT_TRUE(returns(
        [&] {
          for (volatile int spin = 0; spin < round % 4000; ++spin) {
          }
          job.abandon();
        },
        [] {}));
  }
}

// A window that could not be announced is taken by nobody. The job that went on regardless waited
// for it for ever.
TEST_F(StreamJobTest, AWindowThatCannotBeAnnouncedFailsTheJob) {
  class Refusing : public FillJob {
   public:
    explicit Refusing(SlotRing* ring) : FillJob(ring, options(*ring)) {}
    void finish() override { drain(); }
    void abandon() noexcept override { stop(); }

   private:
    static Image::Options options(const SlotRing& ring) {
      Image::Options options;
      options.slot_bytes = ring.slot_bytes();
      return options;
    }
    void announce() override { throw std::bad_alloc(); }
  };
  const Sample large = make_sample(nullptr, random_bytes(random_, 3 * kSlot));
  const Sample small = make_sample(nullptr, random_bytes(random_, kSlot / 2));
  for (const Sample* sample : {&large, &small}) {
    Refusing job(&ring_);
    const auto all = [&] {
      EXPECT_THROW(
          {
            job.add(sample->envelope, sample->source);
            job.finish();
          },
          std::bad_alloc);
      EXPECT_THROW(job.finish(), std::bad_alloc);
    };
    EXPECT_TRUE(returns(all, [&] { job.fail(std::make_exception_ptr(std::bad_alloc())); }));
    job.abandon();
  }
}

}  // namespace
}  // namespace pyckpt
