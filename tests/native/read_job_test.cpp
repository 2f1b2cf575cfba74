// Reading: whatever ranges of whatever files into whatever memory, what arrives is what is there.
#include "read_job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "crc32.h"
#include "engine.h"
#include "error.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

class ReadJobTest : public ::testing::Test {
 protected:
  std::string make_file(const std::string& name, size_t size) {
    const std::string bytes = random_bytes(random_, size);
    std::ofstream(directory_.file(name), std::ios::binary) << bytes;
    return bytes;
  }

  TempDirectory directory_;
  Random random_{7};
};

// Memory for a range, `shift` bytes behind a page boundary.
struct Target {
  Target(size_t size, size_t shift) : memory(std::string(size, '?'), shift), size(size) {}
  Destination destination() const {
    return {const_cast<std::byte*>(memory.data), nullptr, nullptr};
  }
  std::string bytes() const { return {reinterpret_cast<const char*>(memory.data), size}; }

  Memory memory;
  size_t size;
};

TEST_F(ReadJobTest, RandomRangesOfSeveralFiles) {
  const size_t sizes[] = {0, 1, 4095, 4096, 4097, 8193, 99991, 3 << 20};
  for (const size_t slot : {4096, 8192, 65536}) {
    for (const size_t threads : {1, 4}) {
      for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
        Engine engine({slot, threads, threads});
        const std::string files[] = {make_file("a", (7 << 20) + 13), make_file("b", 100)};
        const auto job = engine.make_read(direct, true);
        ASSERT_EQ(job->add_file(directory_.file("a")), 0u);
        ASSERT_EQ(job->add_file(directory_.file("b")), 1u);
        std::vector<std::unique_ptr<Target>> targets;
        std::vector<std::string> expected;
        for (int i = 0; i < 40; ++i) {
          const size_t file = draw(random_, 0, 1);
          const size_t wanted = sizes[draw(random_, 0, std::size(sizes) - 1)];
          const size_t size = std::min(wanted, files[file].size());
          const size_t offset = draw(random_, 0, files[file].size() - size);
          targets.push_back(std::make_unique<Target>(size, draw(random_, 0, 1) * 64));
          expected.push_back(files[file].substr(offset, size));
          ASSERT_EQ(job->add(file, offset, size, targets.back()->destination()),
                    targets.size() - 1);
        }
        const std::vector<uint32_t> checksums = job->run();
        for (size_t i = 0; i < targets.size(); ++i) {
          ASSERT_EQ(difference(targets[i]->bytes(), expected[i]), "");
          ASSERT_EQ(checksums[i], crc32(0, expected[i].data(), expected[i].size()));
        }
      }
    }
  }
}

TEST_F(ReadJobTest, ReadsWhatTwoWantOnce) {
  const std::string file = make_file("a", 4 << 20);
  Engine engine({65536, 2, 2});
  const auto job = engine.make_read(Direct::kAuto, false);
  job->add_file(directory_.file("a"));
  Target all(4 << 20, 0), part(1 << 20, 0);
  job->add(0, 0, all.size, all.destination());
  job->add(0, 1 << 20, part.size, part.destination());
  EXPECT_EQ(job->run(), (std::vector<uint32_t>{0, 0}));  // checksums were not asked for
  EXPECT_EQ(difference(all.bytes(), file), "");
  EXPECT_EQ(difference(part.bytes(), file.substr(1 << 20, 1 << 20)), "");
  EXPECT_EQ(job->statistics().bytes_read, file.size());
  EXPECT_EQ(job->statistics().bytes_needed, file.size() + part.size);
}

TEST_F(ReadJobTest, PassesOverWideGapsAndReadsNarrowOnes) {
  make_file("a", 8 << 20);
  Engine engine({65536, 2, 2});
  const auto bytes_read = [&](uint64_t gap) {
    const auto job = engine.make_read(Direct::kAuto, false);
    job->add_file(directory_.file("a"));
    Target first(4096, 0), second(4096, 0);
    job->add(0, 0, 4096, first.destination());
    job->add(0, 4096 + gap, 4096, second.destination());
    job->run();
    return job->statistics().bytes_read;
  };
  EXPECT_EQ(bytes_read(4096), 3u * 4096);
  EXPECT_EQ(bytes_read(4 * kMergeGap), 2u * 4096);
}

TEST_F(ReadJobTest, ScattersBoxes) {
  const std::string file = make_file("a", 100 * 200 * 4);
  Engine engine({4096, 2, 2});
  // Rows 10 to 40 and columns 5 to 105 of a matrix of 100 x 200 floats, transposed in memory.
  const Strided box({{30, 4, 800}, {100, 120, 4}}, 4);
  std::vector<Strided::Place> places;
  const auto job = engine.make_read(Direct::kAuto, true);
  job->add_file(directory_.file("a"));
  Target target(30 * 100 * 4, 0);
  Destination destination = target.destination();
  destination.strided = box.split(kMergeGap, &places);
  ASSERT_EQ(places.size(), 1u);
  job->add(0, 10 * 800 + 5 * 4, destination.strided->file_bytes(), destination);
  job->run();
  const std::string got = target.bytes();
  for (size_t row = 0; row < 30; ++row) {
    for (size_t column = 0; column < 100; ++column) {
      ASSERT_EQ(got.substr((column * 30 + row) * 4, 4),
                file.substr((10 + row) * 800 + (5 + column) * 4, 4));
    }
  }
}

TEST_F(ReadJobTest, SplitsABoxWithWideGaps) {
  const std::string file = make_file("a", 10 * (1 << 18));
  const Strided box({{10, 16, 1 << 18}, {16, 1, 1}}, 1);
  std::vector<Strided::Place> places;
  const auto piece = box.split(kMergeGap, &places);
  ASSERT_EQ(places.size(), 10u);
  EXPECT_TRUE(piece->dense());
  Engine engine({65536, 2, 2});
  const auto job = engine.make_read(Direct::kAuto, false);
  job->add_file(directory_.file("a"));
  Target target(160, 0);
  for (const Strided::Place& place : places) {
    Destination destination = target.destination();
    destination.data += place.memory_offset;
    destination.strided = piece;
    job->add(0, 100 + place.file_offset, piece->file_bytes(), destination);
  }
  job->run();
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(target.bytes().substr(i * 16, 16), file.substr(100 + i * (1 << 18), 16));
  }
  EXPECT_LE(job->statistics().bytes_read, 10u * 8192);
}

TEST_F(ReadJobTest, IntoADevice) {
  const std::string file = make_file("a", 300001);
  Engine engine({4096, 3, 3});
  const auto job = engine.make_read(Direct::kAuto, true);
  job->add_file(directory_.file("a"));
  Target target(300001, 0);
  Destination destination = target.destination();
  destination.device = std::make_shared<FakeDevice>();
  job->add(0, 0, target.size, destination);
  job->run();
  EXPECT_EQ(difference(target.bytes(), file), "");
}

TEST_F(ReadJobTest, TheFirstErrorStopsIt) {
  make_file("a", 300001);
  Engine engine({4096, 2, 2});
  const auto job = engine.make_read(Direct::kAuto, true);
  job->add_file(directory_.file("a"));
  Target target(300001, 0);
  Destination destination = target.destination();
  destination.device =
      std::make_shared<FakeDevice>([] { throw CudaError("the device fell off the bus"); });
  job->add(0, 0, target.size, destination);
  EXPECT_THROW(job->run(), CudaError);
  // The engine goes on.
  Target again(10, 0);
  const auto next = engine.make_read(Direct::kAuto, true);
  next->add_file(directory_.file("a"));
  next->add(0, 0, 10, again.destination());
  next->run();
}

TEST_F(ReadJobTest, PastTheEndIsAnErrorThatSaysWhere) {
  make_file("a", 5000);
  Engine engine({4096, 2, 2});
  for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
    const auto job = engine.make_read(direct, true);
    job->add_file(directory_.file("a"));
    Target target(6000, 0);
    job->add(0, 0, 6000, target.destination());
    try {
      job->run();
      FAIL() << "read what is not there";
    } catch (const IoError& error) {
      EXPECT_EQ(error.path(), directory_.file("a"));
      EXPECT_NE(error.message().find("the file ends at 5000"), std::string::npos);
    }
  }
}

TEST_F(ReadJobTest, AMissingFile) {
  Engine engine({4096, 1, 1});
  const auto job = engine.make_read(Direct::kAuto, true);
  try {
    job->add_file(directory_.file("none"));
    FAIL() << "opened what is not there";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOENT);
  }
}

TEST_F(ReadJobTest, NothingToRead) {
  Engine engine({4096, 1, 1});
  const auto job = engine.make_read(Direct::kAuto, true);
  job->run();
  EXPECT_FALSE(job->statistics().direct);
}

TEST_F(ReadJobTest, AfterCloseItFails) {
  make_file("a", 5000);
  Engine engine({4096, 1, 1});
  const auto job = engine.make_read(Direct::kAuto, true);
  job->add_file(directory_.file("a"));
  Target target(5000, 0);
  job->add(0, 0, 5000, target.destination());
  engine.close();
  EXPECT_THROW(job->run(), EngineClosed);
  EXPECT_THROW(engine.make_read(Direct::kAuto, true), EngineClosed);
}

// Jobs take turns: none waits for another's end, though the ring has one slot.
TEST_F(ReadJobTest, BesideAWriteThatHasNoEnd) {
  const std::string file = make_file("a", 100000);
  Engine engine({4096, 1, 1});
  const auto write = engine.start_write(directory_.file("b"), {});
  write->add(nullptr, {reinterpret_cast<const std::byte*>(file.data()), file.size(), nullptr,
                       nullptr, nullptr});
  parallelize(4, [&](size_t) {
    const auto job = engine.make_read(Direct::kAuto, true);
    job->add_file(directory_.file("a"));
    Target target(file.size(), 0);
    job->add(0, 0, file.size(), target.destination());
    job->run();
    EXPECT_EQ(difference(target.bytes(), file), "");
  });
  write->finish();
  EXPECT_EQ(difference(read_file(directory_.file("b")), file), "");
}

}  // namespace
}  // namespace pyckpt
