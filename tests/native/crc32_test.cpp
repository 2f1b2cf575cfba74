// CRC-32 against its definition: all variants, every size and start, pieces in any order.
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

// What this processor can run. The last one uses tables alone.
class Crc32VariantTest : public testing::TestWithParam<Crc32Variant> {};

INSTANTIATE_TEST_SUITE_P(Variants, Crc32VariantTest, testing::ValuesIn(crc32_variants()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Crc32VariantTest, KnownVectors) {
  for (const Vector& vector : vectors()) {
    SCOPED_TRACE(vector.message.substr(0, 50));
    EXPECT_EQ(GetParam().crc32(0, vector.message.data(), vector.message.size()), vector.crc);
    EXPECT_EQ(slow_crc32(vector.message), vector.crc);
  }
}

TEST_P(Crc32VariantTest, NothingChangesNothing) {
  char byte = 'x';
  EXPECT_EQ(GetParam().crc32(0x12345678, &byte, 0), 0x12345678u);
  EXPECT_EQ(GetParam().copy(0x12345678, &byte, "y", 0), 0x12345678u);
  EXPECT_EQ(GetParam().copy_past_cache(0x12345678, &byte, "y", 0), 0x12345678u);
  EXPECT_EQ(byte, 'x');
}

// The fast ones fold strides of 256, 128, 64 and 16 bytes: all sizes around several of each.
TEST_P(Crc32VariantTest, EverySmallSizeAtEveryStart) {
  Random random(1);
  const std::string data = random_bytes(random, 700);
  for (size_t start = 0; start <= 64; ++start) {
    for (size_t size = 0; size <= 600; ++size) {
      const uint32_t expected = crc32_variants().back().crc32(0, data.data() + start, size);
      if (start == 0) {
        ASSERT_EQ(expected, slow_crc32(data.substr(0, size))) << size;
      }
      ASSERT_EQ(GetParam().crc32(0, data.data() + start, size), expected) << start << " " << size;
    }
  }
}

TEST_P(Crc32VariantTest, BigOnes) {
  Random random(2);
  const std::string data = random_bytes(random, 3 << 20);
  for (int round = 0; round < 40; ++round) {
    const size_t start = draw(random, 0, 4096);
    const size_t size = draw(random, 0, data.size() - start);
    const auto crc = static_cast<uint32_t>(random());
    ASSERT_EQ(GetParam().crc32(crc, data.data() + start, size),
              crc32_variants().back().crc32(crc, data.data() + start, size));
  }
  EXPECT_EQ(GetParam().crc32(0, data.data(), data.size()), slow_crc32(data));
}

TEST_P(Crc32VariantTest, InPartsAsInWhole) {
  Random random(3);
  const std::string data = random_bytes(random, 20000);
  const uint32_t whole = slow_crc32(data);
  std::string copy(data.size(), '?');
  for (int round = 0; round < 100; ++round) {
    uint32_t crc = 0, copied = 0;
    for (size_t done = 0; done < data.size();) {
      const size_t step = std::min<size_t>(draw(random, 0, 500), data.size() - done);
      crc = GetParam().crc32(crc, data.data() + done, step);
      copied = GetParam().copy(copied, copy.data() + done, data.data() + done, step);
      done += step;
    }
    ASSERT_EQ(crc, whole);
    ASSERT_EQ(copied, whole);
    ASSERT_EQ(difference(copy, data), "");
  }
}

// To and from memory of any alignment, and not a byte beside it.
TEST_P(Crc32VariantTest, CopiesWhatItChecksums) {
  Random random(7);
  std::vector<size_t> sizes = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257};
  for (const size_t size : {4095, 4096, 4097, 4159, 4160, 7919, 131072, 131073}) {
    sizes.push_back(size);
  }
  for (int round = 0; round < 30; ++round) sizes.push_back(draw(random, 1, 10000));
  for (const size_t size : sizes) {
    const std::string bytes = random_bytes(random, size);
    const uint32_t before = static_cast<uint32_t>(random());
    const uint32_t expected = crc32_variants().back().crc32(before, bytes.data(), size);
    for (const size_t to_shift : {0, 1, 16, 17, 32, 63}) {
      for (const size_t from_shift : {0, 1, 8, 48}) {
        for (const auto copy : {GetParam().copy, GetParam().copy_past_cache}) {
          const Memory from(bytes, from_shift);
          Memory to("!" + std::string(size, '?') + "!", to_shift);
          auto* const at = const_cast<std::byte*>(to.data) + 1;
          ASSERT_EQ(copy(before, at, from.data, size), expected) << size << " " << to_shift;
          const std::string got(reinterpret_cast<const char*>(to.data), size + 2);
          ASSERT_EQ(difference(got, "!" + bytes + "!"), "") << size << " " << to_shift;
        }
      }
    }
  }
}

TEST(Crc32, TakesAVariant) {
  const std::string data = "123456789";
  std::string copy(data.size(), '?');
  EXPECT_EQ(crc32(0, data.data(), data.size()), 0xCBF43926);
  EXPECT_EQ(copy_crc32(0, copy.data(), data.data(), data.size()), 0xCBF43926);
  EXPECT_EQ(copy, data);
  EXPECT_STREQ(crc32_variants().back().name, "portable");
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
  const auto portable = crc32_variants().back().crc32;
  const uint32_t whole = portable(slow_crc32(head), zeros.data(), zeros.size());
  const uint32_t tail = portable(0, zeros.data(), zeros.size());
  EXPECT_EQ(crc32_shift(slow_crc32(head), zeros.size()) ^ tail, whole);
}

}  // namespace
}  // namespace pyckpt
