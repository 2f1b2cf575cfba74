// CRC-32 against its definition: both implementations, every size and start, pieces in any order.
#include "crc32.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

struct Vector {
  std::string message;
  uint32_t crc;
};

const std::vector<Vector>& vectors() {
  static const std::vector<Vector> vectors = {
      {"", 0x00000000},
      {"a", 0xE8B7BE43},
      {"123456789", 0xCBF43926},
      {"The quick brown fox jumps over the lazy dog", 0x414FA339},
      {std::string(32, '\x00'), 0x190A55AD},
      {std::string(32, '\xFF'), 0xFF6CAB0B},
      {std::string(1000000, 'a'), 0xDC25BFBC},
  };
  return vectors;
}

TEST(Crc32, KnownVectors) {
  for (const Vector& vector : vectors()) {
    SCOPED_TRACE(vector.message.substr(0, 50));
    EXPECT_EQ(crc32(0, vector.message.data(), vector.message.size()), vector.crc);
    EXPECT_EQ(crc32_portable(0, vector.message.data(), vector.message.size()), vector.crc);
    EXPECT_EQ(slow_crc32(vector.message), vector.crc);
  }
}

TEST(Crc32, NothingChangesNothing) {
  EXPECT_EQ(crc32(0x12345678, nullptr, 0), 0x12345678u);
  EXPECT_EQ(crc32_portable(0x12345678, nullptr, 0), 0x12345678u);
}

// The blocks that the fast one folds are of 64 and 16 bytes: all sizes around several of both.
TEST(Crc32, EverySmallSizeAtEveryStart) {
  Random random(1);
  const std::string data = random_bytes(random, 400);
  for (size_t start = 0; start <= 64; ++start) {
    for (size_t size = 0; size <= 300; ++size) {
      const uint32_t expected = slow_crc32(data.substr(start, size));
      ASSERT_EQ(crc32(0, data.data() + start, size), expected) << start << " " << size;
      ASSERT_EQ(crc32_portable(0, data.data() + start, size), expected) << start << " " << size;
    }
  }
}

TEST(Crc32, BigOnes) {
  Random random(2);
  const std::string data = random_bytes(random, 3 << 20);
  for (int round = 0; round < 40; ++round) {
    const size_t start = draw(random, 0, 4096);
    const size_t size = draw(random, 0, data.size() - start);
    const auto crc = static_cast<uint32_t>(random());
    ASSERT_EQ(crc32(crc, data.data() + start, size),
              crc32_portable(crc, data.data() + start, size));
  }
  EXPECT_EQ(crc32(0, data.data(), data.size()), slow_crc32(data));
}

TEST(Crc32, InPartsAsInWhole) {
  Random random(3);
  const std::string data = random_bytes(random, 20000);
  const uint32_t whole = slow_crc32(data);
  for (int round = 0; round < 100; ++round) {
    uint32_t fast = 0, portable = 0;
    for (size_t done = 0; done < data.size();) {
      const size_t step = std::min<size_t>(draw(random, 0, 500), data.size() - done);
      fast = crc32(fast, data.data() + done, step);
      portable = crc32_portable(portable, data.data() + done, step);
      done += step;
    }
    ASSERT_EQ(fast, whole);
    ASSERT_EQ(portable, whole);
  }
}

TEST(Crc32, PiecesCombineInAnyOrder) {
  Random random(4);
  for (int round = 0; round < 200; ++round) {
    const std::string data = random_bytes(random, draw(random, 1, 5000));
    std::vector<uint32_t> parts;
    for (size_t begin = 0; begin < data.size();) {
      const size_t size = std::min<size_t>(draw(random, 1, 700), data.size() - begin);
      const uint32_t crc = slow_crc32(data.substr(begin, size));
      parts.push_back(crc32_shift(crc, data.size() - begin - size));
      begin += size;
    }
    std::shuffle(parts.begin(), parts.end(), random);
    uint32_t combined = 0;
    for (const uint32_t part : parts) combined ^= part;
    ASSERT_EQ(combined, slow_crc32(data));
  }
}

TEST(Crc32, ShiftByNothingIsNothing) {
  Random random(5);
  for (int round = 0; round < 100; ++round) {
    const auto crc = static_cast<uint32_t>(random());
    ASSERT_EQ(crc32_shift(crc, 0), crc);
    ASSERT_EQ(crc32_shift(0, random()), 0u);
  }
}

// Sizes whose eightfold does not fit 64 bits, too.
TEST(Crc32, ShiftsAddUp) {
  Random random(6);
  for (int round = 0; round < 300; ++round) {
    const auto crc = static_cast<uint32_t>(random());
    const uint64_t first = random() >> draw(random, 1, 63);
    const uint64_t second = random() >> draw(random, 1, 63);
    ASSERT_EQ(crc32_shift(crc32_shift(crc, first), second), crc32_shift(crc, first + second));
  }
}

TEST(Crc32, ShiftByManyBytes) {
  const std::string head = "123456789";
  const std::string zeros(10'000'019, '\0');
  const uint32_t whole = crc32_portable(slow_crc32(head), zeros.data(), zeros.size());
  const uint32_t tail = crc32_portable(0, zeros.data(), zeros.size());
  EXPECT_EQ(crc32_shift(slow_crc32(head), zeros.size()) ^ tail, whole);
}

}  // namespace
}  // namespace pyckpt
