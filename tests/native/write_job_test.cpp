// Jobs: the bytes of their files, that nothing hangs, and what remains of a failure.
#include "write_job.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "kernel.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

// What an engine lends to jobs.
struct Pool {
  Pool(size_t slot_bytes, size_t slots, size_t threads) : ring(slots, slot_bytes), io(threads) {}
  std::shared_ptr<WriteJob> start(const std::string& path, const WriteOptions& options = {}) {
    return WriteJob::start(&ring, &io, path, options);
  }
  SlotRing ring;
  IoThreads io;
};

// Where and whether to write, cheaply: syncing is tested by itself.
WriteOptions unsynced(Direct direct = Direct::kAuto) { return {direct, false, 0}; }

void feed(WriteJob* job, const std::vector<Sample>& samples) {
  for (const Sample& sample : samples) {
    if (!job->add(sample.envelope, sample.source)) job->wait_for_room();
  }
}

class WriteJobTest : public testing::Test {
 protected:
  // Writes the samples and holds the outcome against the reference.
  void check(Pool* pool, const std::vector<Sample>& samples, const WriteOptions& options,
             const std::string& path) {
    const auto job = pool->start(path, options);
    const bool ended = returns(
        [&] {
          feed(job.get(), samples);
          job->finish();
        },
        [&] { job->fail(std::make_exception_ptr(std::runtime_error("it hung"))); });
    ASSERT_TRUE(ended) << "a deadlock";
    check_outcome(*job, samples, path);
  }

  static void check_outcome(const WriteJob& job, const std::vector<Sample>& samples,
                            const std::string& path) {
    std::vector<Place> places;
    const std::string expected = reference_file(samples, &places);
    ASSERT_EQ(difference(read_file(path), expected), "");
    ASSERT_EQ(job.items().size(), samples.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      const Item& item = job.items()[i];
      ASSERT_EQ(item.offset, places[i].offset) << "item " << i;
      ASSERT_EQ(item.length, places[i].length) << "item " << i;
      ASSERT_EQ(item.payload_offset, places[i].payload_offset) << "item " << i;
      ASSERT_EQ(item.crc.load(), places[i].crc) << "item " << i;
    }
    const WriteStatistics statistics = job.statistics();
    ASSERT_EQ(statistics.items, samples.size());
    ASSERT_EQ(statistics.bytes_added, expected.size());
    ASSERT_EQ(statistics.bytes_written, expected.size());
  }

  // An item of any kind and of a size that hurts.
  Sample random_sample(size_t slot_bytes) {
    const size_t size = std::vector<size_t>{0,
                                            1,
                                            4095,
                                            4096,
                                            4097,
                                            slot_bytes - 1,
                                            slot_bytes,
                                            slot_bytes + 1,
                                            7919,
                                            65535,
                                            65536,
                                            65537,
                                            draw(random_, 0, 20000),
                                            draw(random_, 0, 200000)}[draw(random_, 0, 13)];
    return sample_of(draw(random_, 0, 24) == 0 ? (1 << 20) + draw(random_, 0, 1) * 4099 : size);
  }

  Sample sample_of(size_t size) {
    std::shared_ptr<Envelope> envelope;
    if (draw(random_, 0, 3) != 0) {
      envelope = make_envelope(random_, draw(random_, 0, 3000), draw(random_, 0, 3000), size);
    }
    const uint64_t kind = draw(random_, 0, 5);
    if (kind == 0 && size > 0 && size < 300000) return strided_sample(envelope, size);
    Sample sample = make_sample(envelope, random_bytes(random_, size), kind < 3 ? 0 : kind);
    if (kind == 1) sample.source.device = std::make_shared<FakeDevice>();
    return sample;
  }

  // Every second byte of its memory.
  Sample strided_sample(std::shared_ptr<Envelope> envelope, size_t size) {
    const std::string memory = random_bytes(random_, 2 * size);
    Sample sample = make_sample(std::move(envelope), memory);
    sample.payload.clear();
    for (size_t i = 0; i < size; ++i) sample.payload += memory[2 * i];
    sample.source.size = size;
    sample.source.strided = std::make_shared<Strided>(
        std::vector<int64_t>{static_cast<int64_t>(size)}, std::vector<int64_t>{2}, size_t{1});
    return sample;
  }

  // One that is copied from a device, after `before_copy`.
  Sample device_sample(size_t size, std::function<void()> before_copy) {
    Sample sample = make_sample(nullptr, random_bytes(random_, size));
    sample.source.device = std::make_shared<FakeDevice>(std::move(before_copy));
    return sample;
  }

  TempDirectory directory_;
  const std::string path_ = directory_.file("file");
  Random random_{1};
};

TEST_F(WriteJobTest, NothingIsAnEmptyFile) {
  Pool pool(4096, 1, 2);
  const auto job = pool.start(path_);
  job->finish();
  EXPECT_EQ(read_file(path_), "");
  EXPECT_EQ(job->statistics().items, 0u);
}

TEST_F(WriteJobTest, LiteralBytes) {
  auto envelope = std::make_shared<Envelope>();
  envelope->prefix = "head";
  envelope->suffix = "<CCCC>";
  envelope->crc_positions = {1};
  envelope->payload_size = 9;
  const Sample framed = make_sample(envelope, "123456789");
  const Sample bare = make_sample(nullptr, "abc");
  Pool pool(4096, 2, 2);
  const auto job = pool.start(path_);
  job->add(framed.envelope, framed.source);
  job->add(bare.envelope, bare.source);
  job->finish();
  EXPECT_EQ(read_file(path_), "head123456789<\x26\x39\xF4\xCB>abc");
  EXPECT_EQ(job->items()[0].crc.load(), 0xCBF43926u);
  EXPECT_EQ(job->items()[1].offset, 19u);
}

// Slots come back with the bytes of before; gaps and the padding must not show them.
TEST_F(WriteJobTest, GapsAreZero) {
  Pool pool(1 << 17, 1, 1);
  check(&pool, {make_sample(nullptr, std::string(3 << 17, '\xFF'), 1)}, unsynced(), path_);
  std::vector<Sample> samples;
  for (const size_t size : {1, 65536, 5, 70000, 65536, 3}) {
    samples.push_back(make_sample(make_envelope(random_, 10, 10, size), std::string(size, '\xFF')));
  }
  check(&pool, samples, unsynced(), directory_.file("gaps"));
}

// What the last write is padded with, up to the disk's blocks, is zero as well, though it is cut
// off: it is on the disk for a moment.
TEST_F(WriteJobTest, PaddingIsZero) {
  Pool pool(8192, 1, 1);
  check(&pool, {make_sample(nullptr, std::string(8192, '\xFF'))}, unsynced(), path_);
  std::string written;  // by the one thread
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) {
    written.assign(static_cast<const char*>(data), size);
    return real_pwrite(descriptor, data, size, offset);
  };
  const HookedKernel hooked(hooks);
  const auto job = pool.start(directory_.file("padded"), unsynced());
  const Sample sample = make_sample(nullptr, "abc");
  job->add(nullptr, sample.source);
  job->finish();
  if (job->statistics().direct) {
    EXPECT_GE(written.size(), 512u);
  }
  EXPECT_EQ(written, "abc" + std::string(written.size() - 3, '\0'));
}

TEST_F(WriteJobTest, SizesThatHurt) {
  for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
    for (const size_t slot : {4096, 12288}) {
      Pool pool(slot, 2, 2);
      for (const size_t size : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097},
                                slot - 1, slot + 1, 2 * slot, size_t{7919}, size_t{65537}}) {
        remove_file(path_);
        std::vector<Sample> samples;
        for (int i = 0; i < 3; ++i) samples.push_back(sample_of(size));
        ASSERT_NO_FATAL_FAILURE(check(&pool, samples, unsynced(direct), path_)) << size;
      }
    }
  }
}

TEST_F(WriteJobTest, RandomItems) {
  for (int round = 0; round < 40; ++round) {
    const size_t slot = std::vector<size_t>{4096, 8192, 12288, 65536, 1 << 20}[round % 5];
    Pool pool(slot, draw(random_, 1, 8), draw(random_, 1, 4));
    std::vector<Sample> samples;
    const size_t items = draw(random_, 1, 25);
    for (size_t i = 0; i < items; ++i) samples.push_back(random_sample(slot));
    const WriteOptions options{round % 2 == 0 ? Direct::kAuto : Direct::kOff, round % 10 == 0,
                               draw(random_, 0, 1) * draw(random_, 0, 1 << 20)};
    const std::string path = directory_.file(std::to_string(round));
    ASSERT_NO_FATAL_FAILURE(check(&pool, samples, options, path)) << "round " << round;
    remove_file(path);
  }
}

TEST_F(WriteJobTest, ManySmallItems) {
  Pool pool(4096, 4, 4);
  std::vector<Sample> samples;
  for (int i = 0; i < 3000; ++i) {
    const size_t size = draw(random_, 0, 300);
    samples.push_back(
        make_sample(make_envelope(random_, 90, 110, size), random_bytes(random_, size)));
  }
  check(&pool, samples, unsynced(), path_);
}

// An item that spans far more windows than there are slots: its suffix waits for all of them.
TEST_F(WriteJobTest, OneSlotAndManyWindows) {
  for (const size_t threads : {1, 4}) {
    Pool pool(4096, 1, threads);
    std::vector<Sample> samples;
    for (const size_t size : {400000, 3, 100000, 4096, 65536}) {
      samples.push_back(
          make_sample(make_envelope(random_, 500, 700, size), random_bytes(random_, size), 1));
    }
    const std::string path = directory_.file(std::to_string(threads));
    ASSERT_NO_FATAL_FAILURE(check(&pool, samples, unsynced(), path));
  }
}

// In-place windows need no slot, but their items' suffixes do.
TEST_F(WriteJobTest, InPlaceBesideOneSlot) {
  Pool pool(64 << 10, 1, 4);
  std::vector<Sample> samples;
  for (const size_t size : {1 << 20, (1 << 20) + 1, 3 << 19, (1 << 20) + 4095}) {
    samples.push_back(
        make_sample(make_envelope(random_, 500, 700, size), random_bytes(random_, size)));
  }
  check(&pool, samples, unsynced(), path_);
}

// A window that begins with the suffix of an item of the windows before it. While their thread
// still copies, this one's waits for the checksum; it must hear of it as soon as it is there, not
// when the disk has the other window. So for a payload that lies in one window, and for one of two.
TEST_F(WriteJobTest, ASuffixInTheNextWindowHearsOfItsChecksum) {
  for (const off_t size : {4096, 8192}) {
    SCOPED_TRACE(size);
    Gate copying, leave, suffix_written;
    Hooks hooks;
    hooks.pwrite = [&](int descriptor, const void* data, size_t count, off_t offset) {
      if (offset == size - 4096) suffix_written.wait();
      if (offset == size) suffix_written.open();
      return real_pwrite(descriptor, data, count, offset);
    };
    const HookedKernel hooked(hooks);
    Pool pool(4096, 2, 2);
    std::atomic<off_t> copied{0};
    Sample sample = device_sample(size, [&] {
      if (copied.fetch_add(4096) + 4096 < size) return;
      copying.open();
      leave.wait();
    });
    sample.envelope = make_envelope(random_, 0, 100, size);
    const std::string path = directory_.file(std::to_string(size));
    const auto job = pool.start(path, unsynced());
    bool ended = false;
    std::thread finisher([&] {
      job->add(sample.envelope, sample.source);
      ended = returns([&] { job->finish(); }, [&] { suffix_written.open(); });
    });
    copying.wait();
    while (pool.ring.try_acquire()) std::this_thread::yield();  // until both slots are taken
    for (const pid_t thread : threads_named("pyckpt-io")) wait_until_asleep(thread);
    leave.open();
    finisher.join();
    EXPECT_TRUE(ended) << "the thread that waited for the checksum was not woken by it";
    check_outcome(*job, {sample}, path);
  }
}

TEST_F(WriteJobTest, SeveralJobsOnOneRing) {
  Pool pool(8192, 3, 3);
  std::vector<std::vector<Sample>> files(4);
  for (auto& samples : files) {
    for (int i = 0; i < 12; ++i) samples.push_back(random_sample(8192));
  }
  parallelize(files.size(), [&](size_t i) {
    for (int round = 0; round < 3; ++round) {
      const std::string name = std::to_string(i) + "-" + std::to_string(round);
      check(&pool, files[i], unsynced(), directory_.file(name));
    }
  });
}

TEST_F(WriteJobTest, EnoughSlotsMeansNoWaits) {
  Pool pool(4096, 3, 3);
  const auto job = pool.start(path_, unsynced());
  const Sample sample = make_sample(nullptr, random_bytes(random_, 300000));
  feed(job.get(), {sample});
  job->finish();
  EXPECT_EQ(job->statistics().slot_waits, 0u);
}

TEST_F(WriteJobTest, WaitsForASlotAreCounted) {
  Pool pool(4096, 1, 1);
  Slot slot = pool.ring.try_acquire();
  const auto job = pool.start(path_, unsynced());
  const Sample sample = make_sample(nullptr, random_bytes(random_, 4096));
  feed(job.get(), {sample});
  for (const pid_t thread : threads_named("pyckpt-io")) wait_until_asleep(thread);
  EXPECT_EQ(job->statistics().bytes_written, 0u);
  slot.release();
  job->finish();
  EXPECT_EQ(job->statistics().slot_waits, 1u);
  EXPECT_EQ(difference(read_file(path_), sample.payload), "");
}

// With its one thread in the middle of a window, what else is queued can be counted.
TEST_F(WriteJobTest, BackpressureBoundsWhatIsQueued) {
  Pool pool(4096, 2, 1);
  Gate copying, leave;
  const Sample held = device_sample(4096, [&] {
    copying.open();
    leave.wait();
  });
  const Sample sample = make_sample(nullptr, random_bytes(random_, 4096));
  const auto job = pool.start(path_, unsynced());
  EXPECT_TRUE(job->add(nullptr, held.source));
  copying.wait();
  constexpr uint64_t kQueued = kQueuedRings * 2;  // in slots, of which the ring has two
  std::string written = held.payload;
  for (uint64_t i = 0; i <= kQueued; ++i) {
    EXPECT_EQ(job->add(nullptr, sample.source), i < kQueued);
    written += sample.payload;
  }
  std::atomic<bool> room{false};
  std::thread feeder([&] {
    job->wait_for_room();
    room = true;
  });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_FALSE(room.load());
  leave.open();
  feeder.join();
  job->finish();
  EXPECT_EQ(difference(read_file(path_), written), "");
}

TEST_F(WriteJobTest, AFeederThatHeedsItStaysInBounds) {
  constexpr uint64_t kSlot = 4096, kSlots = 3, kThreads = 3, kItem = 9000;
  Pool pool(kSlot, kSlots, kThreads);
  const auto job = pool.start(path_, unsynced());
  const Sample sample = make_sample(nullptr, random_bytes(random_, kItem), 1);
  uint64_t outstanding_max = 0;
  for (int i = 0; i < 500; ++i) {
    if (!job->add(nullptr, sample.source)) job->wait_for_room();
    const WriteStatistics statistics = job->statistics();
    outstanding_max = std::max(outstanding_max, statistics.bytes_added - statistics.bytes_written);
  }
  job->finish();
  // The rings queued, an item on top, a window in each thread's hands, one being filled.
  EXPECT_LE(outstanding_max, kQueuedRings * kSlot * kSlots + kItem + (kThreads + 1) * kSlot);
  EXPECT_EQ(read_file(path_).size(), 500 * kItem);
}

TEST_F(WriteJobTest, ConsumedCountsFromTheFirst) {
  Pool pool(4096, 2, 1);
  Gate copying, leave;
  const Sample first = make_sample(nullptr, random_bytes(random_, 4096));
  const Sample held = device_sample(8192, [&] {
    copying.open();
    leave.wait();
  });
  const Sample empty = make_sample(nullptr, "");
  const auto job = pool.start(path_, unsynced());
  EXPECT_EQ(job->consumed(), 0u);
  for (const Sample* sample : {&first, &held, &empty}) job->add(nullptr, sample->source);
  copying.wait();
  EXPECT_EQ(job->consumed(), 1u);  // the third is, but the second is not
  leave.open();
  job->finish();
  EXPECT_EQ(job->consumed(), 3u);
}

// Its source may be freed then, so that the disk must have read it.
TEST_F(WriteJobTest, InPlaceIsNotConsumedBeforeItIsWritten) {
  Gate writing, leave;
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) {
    writing.open();
    leave.wait();
    return real_pwrite(descriptor, data, size, offset);
  };
  const HookedKernel hooked(hooks);
  Pool pool(1 << 20, 1, 1);
  const Sample sample = make_sample(nullptr, random_bytes(random_, 1 << 20));
  const auto job = pool.start(path_, unsynced());
  job->add(nullptr, sample.source);
  writing.wait();
  EXPECT_EQ(job->consumed(), 0u) << "its memory may be freed while the kernel reads it";
  leave.open();
  job->finish();
  EXPECT_EQ(job->consumed(), 1u);
}

TEST_F(WriteJobTest, AbandonRemovesTheFile) {
  Pool pool(4096, 2, 2);
  const Sample sample = make_sample(nullptr, random_bytes(random_, 100000));
  auto job = pool.start(path_, unsynced());
  EXPECT_TRUE(exists(path_));
  job->add(nullptr, sample.source);
  job->abandon();
  EXPECT_FALSE(exists(path_));
  EXPECT_THROW(job->add(nullptr, sample.source), std::runtime_error);
  EXPECT_THROW(job->finish(), std::runtime_error);
  job->abandon();
  EXPECT_GE(job->statistics().seconds, 0);
}

// Nothing reads a source after that: it may be freed.
TEST_F(WriteJobTest, AbandonWaitsForTransfersUnderWay) {
  Pool pool(4096, 2, 1);
  Gate copying, leave;
  std::atomic<bool> left{false}, abandoned{false};
  const Sample held = device_sample(20000, [&] {
    copying.open();
    leave.wait();
    left = true;
  });
  const auto job = pool.start(path_, unsynced());
  job->add(nullptr, held.source);
  copying.wait();
  std::thread abandoner([&] {
    job->abandon();
    EXPECT_TRUE(left.load());
    abandoned = true;
  });
  EXPECT_FALSE(abandoned.load());
  leave.open();
  abandoner.join();
  EXPECT_FALSE(exists(path_));
}

TEST_F(WriteJobTest, AbandonAfterFinishIsNothing) {
  Pool pool(4096, 2, 2);
  const auto job = pool.start(path_, unsynced());
  job->finish();
  job->abandon();
  EXPECT_TRUE(exists(path_));
}

// Also one that waits behind another for its threads.
TEST_F(WriteJobTest, AbandonOfAJobThatNoThreadServes) {
  Pool pool(4096, 2, 1);
  Gate copying, leave;
  const Sample held = device_sample(4096, [&] {
    copying.open();
    leave.wait();
  });
  const auto first = pool.start(directory_.file("first"), unsynced());
  first->add(nullptr, held.source);
  copying.wait();
  const auto second = pool.start(path_, unsynced());
  const Sample sample = make_sample(nullptr, random_bytes(random_, 10000));
  second->add(nullptr, sample.source);
  second->abandon();
  EXPECT_FALSE(exists(path_));
  leave.open();
  first->finish();
  EXPECT_EQ(read_file(directory_.file("first")), held.payload);
}

TEST_F(WriteJobTest, TheFirstErrorSticks) {
  for (const size_t threads : {1, 4}) {
    Pool pool(4096, 2, threads);
    const Sample good = make_sample(nullptr, random_bytes(random_, 4096));
    const Sample bad = device_sample(100, [] { throw CudaError("the device is gone"); });
    auto job = pool.start(path_, unsynced());
    feed(job.get(), {good, bad, good});
    for (int i = 0; i < 2; ++i) {
      try {
        job->finish();
        ADD_FAILURE() << "no error";
      } catch (const CudaError& error) {
        EXPECT_STREQ(error.what(), "the device is gone");
      }
      EXPECT_THROW(job->add(nullptr, good.source), CudaError);
    }
    job->fail(std::make_exception_ptr(std::logic_error("a later one")));
    EXPECT_THROW(job->finish(), CudaError);
    job->wait_for_room();  // does not hang
    job->abandon();
    EXPECT_FALSE(exists(path_));
    // The slots are back.
    const std::string path = directory_.file("next" + std::to_string(threads));
    ASSERT_NO_FATAL_FAILURE(check(&pool, {good, good}, unsynced(), path));
  }
}

TEST_F(WriteJobTest, AddThrowsWithoutWaitingForFinish) {
  Pool pool(4096, 2, 1);
  const Sample good = make_sample(nullptr, random_bytes(random_, 4096));
  const Sample bad = device_sample(4096, [] { throw CudaError("the device is gone"); });
  const auto job = pool.start(path_, unsynced());
  job->add(nullptr, bad.source);
  EXPECT_THROW(
      {
        for (int i = 0; i < 10000; ++i) {
          if (!job->add(nullptr, good.source)) job->wait_for_room();
        }
      },
      CudaError);
  job->abandon();
}

// Two threads fail; the order is forced.
TEST_F(WriteJobTest, ALaterErrorDoesNotReplaceTheFirst) {
  Pool pool(4096, 2, 2);
  Gate both, failed;
  const Sample late = device_sample(4096, [&] {
    both.open();
    failed.wait();
    throw CudaError("late");
  });
  const Sample early = device_sample(4096, [&] {
    both.wait();
    throw CudaError("early");
  });
  const Sample good = make_sample(nullptr, random_bytes(random_, 4096));
  const auto job = pool.start(path_, unsynced());
  job->add(nullptr, late.source);
  job->add(nullptr, early.source);
  EXPECT_THROW(
      {
        for (int i = 0; i < 10000; ++i) {
          if (!job->add(nullptr, good.source)) job->wait_for_room();
        }
      },
      CudaError);
  failed.open();
  try {
    job->finish();
    ADD_FAILURE() << "no error";
  } catch (const CudaError& error) {
    EXPECT_STREQ(error.what(), "early");
  }
  job->abandon();
}

// Threads that wait for the checksum of an item whose copy failed must not wait for ever.
TEST_F(WriteJobTest, AnErrorWakesWhoWaitsForAChecksum) {
  for (int round = 0; round < 50; ++round) {
    Pool pool(4096, 4, 4);
    Gate copying, leave;
    Sample bad = device_sample(3 * 4096, [&] {
      copying.open();
      leave.wait();
      throw CudaError("the device is gone");
    });
    bad.envelope = make_envelope(random_, 0, 5000, bad.source.size);
    const auto job = pool.start(path_, unsynced());
    job->add(bad.envelope, bad.source);
    std::thread finisher([&] { EXPECT_THROW(job->finish(), CudaError); });
    copying.wait();
    leave.open();
    finisher.join();
    job->abandon();
  }
}

TEST_F(WriteJobTest, FailFromOutside) {
  Pool pool(4096, 2, 2);
  const auto job = pool.start(path_, unsynced());
  const Sample good = make_sample(nullptr, random_bytes(random_, 50000));
  job->add(nullptr, good.source);
  job->fail(std::make_exception_ptr(std::logic_error("enough")));
  EXPECT_THROW(job->add(nullptr, good.source), std::logic_error);
  EXPECT_THROW(job->finish(), std::logic_error);
  job->abandon();
  EXPECT_FALSE(exists(path_));
}

TEST_F(WriteJobTest, FullDisk) {
  const TinyDisk disk(256 << 10);
  if (!disk.mounted()) GTEST_SKIP() << disk.refusal();
  for (const size_t threads : {1, 4}) {
    Pool pool(16384, 4, threads);
    const std::string path = disk.file("file");
    const Sample sample = make_sample(nullptr, random_bytes(random_, 300 << 10), 1);
    const auto job = pool.start(path, unsynced());
    try {
      feed(job.get(), {sample});
      job->finish();
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), ENOSPC);
      EXPECT_EQ(error.path(), path);
      EXPECT_NE(error.message().find("at offset"), std::string::npos) << error.message();
    }
    job->abandon();
    EXPECT_FALSE(exists(path));
  }
}

TEST_F(WriteJobTest, FullDiskAtTheStart) {
  const TinyDisk disk(256 << 10);
  if (!disk.mounted()) GTEST_SKIP() << disk.refusal();
  Pool pool(16384, 4, 2);
  EXPECT_THROW(pool.start(disk.file("file"), {Direct::kAuto, true, 300 << 10}), IoError);
  EXPECT_FALSE(exists(disk.file("file")));
}

// An error of any one write fails the job, whichever it is.
TEST_F(WriteJobTest, EveryWriteMayFail) {
  constexpr size_t kSlot = 4096, kSize = 10 * kSlot;
  const Sample sample =
      make_sample(make_envelope(random_, 0, 10, kSize), random_bytes(random_, kSize), 1);
  for (size_t failing = 0; failing <= kSize / kSlot; ++failing) {
    Hooks hooks;
    hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
      if (offset == static_cast<off_t>(failing * kSlot)) return refuse(EIO);
      return real_pwrite(descriptor, data, size, offset);
    };
    const HookedKernel hooked(hooks);
    Pool pool(kSlot, 2, 3);
    const auto job = pool.start(path_, unsynced());
    try {
      feed(job.get(), {sample});
      job->finish();
      ADD_FAILURE() << "no error from write " << failing;
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), EIO);
      const std::string where = "at offset " + std::to_string(failing * kSlot) + ")";
      EXPECT_NE(error.message().find(where), std::string::npos) << error.message();
    }
    job->abandon();
    EXPECT_FALSE(exists(path_));
  }
}

TEST_F(WriteJobTest, FailingToEndIsAFailure) {
  const std::vector<const char*> calls = {"ftruncate", "fsync of the file",
                                          "fsync of the directory"};
  for (size_t failing = 0; failing < calls.size(); ++failing) {
    SCOPED_TRACE(calls[failing]);
    Hooks hooks;
    hooks.ftruncate = [&](int descriptor, off_t size) {
      return failing == 0 ? refuse(EIO) : real_ftruncate(descriptor, size);
    };
    hooks.fsync = [&](int descriptor) {
      const bool file = path_of(descriptor) == path_;
      return failing == (file ? 1u : 2u) ? refuse(EIO) : real_fsync(descriptor);
    };
    const HookedKernel hooked(hooks);
    Pool pool(4096, 2, 2);
    auto job = pool.start(path_);
    const Sample sample = make_sample(nullptr, "abc");
    job->add(nullptr, sample.source);
    EXPECT_THROW(job->finish(), IoError);
    EXPECT_THROW(job->finish(), IoError);
    EXPECT_THROW(job->add(nullptr, sample.source), IoError);
    job->abandon();
    EXPECT_FALSE(exists(path_));
  }
}

// All of the file is written before it is cut and synced, and its name is synced last.
TEST_F(WriteJobTest, SyncsInOrder) {
  for (const bool sync : {true, false}) {
    std::mutex mutex;
    std::vector<std::string> calls;
    const auto note = [&](const std::string& call) {
      std::lock_guard lock(mutex);
      calls.push_back(call);
    };
    Hooks hooks;
    hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) {
      const ssize_t written = real_pwrite(descriptor, data, size, offset);
      note("pwrite");
      return written;
    };
    hooks.ftruncate = [&](int descriptor, off_t size) {
      note("ftruncate " + std::to_string(size));
      return real_ftruncate(descriptor, size);
    };
    hooks.fsync = [&](int descriptor) {
      note("fsync " + path_of(descriptor));
      return real_fsync(descriptor);
    };
    const HookedKernel hooked(hooks);
    Pool pool(4096, 3, 3);
    remove_file(path_);
    const auto job = pool.start(path_, {Direct::kAuto, sync, 100000});
    const Sample sample = make_sample(nullptr, random_bytes(random_, 10001));
    job->add(nullptr, sample.source);
    job->finish();
    std::vector<std::string> expected = {"pwrite", "pwrite", "pwrite", "ftruncate 10001"};
    if (sync) {
      expected.push_back("fsync " + path_);
      expected.push_back("fsync " + directory_.path());
    }
    EXPECT_EQ(calls, expected);
  }
}

// A path without a directory lies in the current one.
TEST_F(WriteJobTest, ABareFileName) {
  const int before = ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::chdir(directory_.path().c_str()), 0);
  Pool pool(4096, 2, 1);
  const auto job = pool.start("file");
  const Sample sample = make_sample(nullptr, "abc");
  job->add(nullptr, sample.source);
  EXPECT_NO_THROW(job->finish());
  job->abandon();
  EXPECT_EQ(::fchdir(before), 0);
  ::close(before);
}

// The file system takes no direct I/O after all: the job goes on without, and says so.
TEST_F(WriteJobTest, FallsBackInTheMiddle) {
  if (!File::create(directory_.file("probe"), Direct::kAuto).direct()) {
    GTEST_SKIP() << "the file system of " << directory_.path() << " has no direct I/O";
  }
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    if (offset >= 20480 && (::fcntl(descriptor, F_GETFL) & O_DIRECT)) return refuse(EINVAL);
    return real_pwrite(descriptor, data, size, offset);
  };
  const HookedKernel hooked(hooks);
  Pool pool(4096, 4, 4);
  const Sample sample = make_sample(nullptr, random_bytes(random_, 100001), 1);
  const auto job = pool.start(path_, unsynced());
  job->add(nullptr, sample.source);
  job->finish();
  check_outcome(*job, {sample}, path_);
  EXPECT_FALSE(job->statistics().direct);
  EXPECT_EQ(job->statistics().fallback_reason, "pwrite: Invalid argument");

  const auto strict = pool.start(directory_.file("strict"), unsynced(Direct::kRequire));
  strict->add(nullptr, sample.source);
  EXPECT_THROW(strict->finish(), IoError);
  strict->abandon();
}

TEST_F(WriteJobTest, StatisticsMayBeReadAllTheWhile) {
  Pool pool(4096, 3, 3);
  const auto job = pool.start(path_, unsynced());
  std::atomic<bool> done{false};
  std::thread reader([&] {
    uint64_t written = 0;
    while (!done.load()) {
      const WriteStatistics statistics = job->statistics();
      EXPECT_GE(statistics.bytes_written, written);
      EXPECT_LE(statistics.bytes_written, 300u * 5000);
      written = statistics.bytes_written;
    }
  });
  const Sample sample = make_sample(nullptr, random_bytes(random_, 5000));
  for (int i = 0; i < 300; ++i) feed(job.get(), {sample});
  job->finish();
  done = true;
  reader.join();
  const WriteStatistics statistics = job->statistics();
  EXPECT_EQ(statistics.items, 300u);
  EXPECT_EQ(statistics.bytes_written, 300u * 5000);
  EXPECT_EQ(job->statistics().seconds, statistics.seconds);  // its clock stands still
}

}  // namespace
}  // namespace pyckpt
