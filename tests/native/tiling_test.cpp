// Whether boxes fill a box, against counting each element.
#include "tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

uint64_t below(Random& random, uint64_t end) { return draw(random, 0, end - 1); }

TEST(Tiling, OneDimension) {
  EXPECT_TRUE(is_tiling({8}, {4, 0}, {4, 4}));
  EXPECT_FALSE(is_tiling({8}, {0, 1}, {4, 4}));
  EXPECT_FALSE(is_tiling({8}, {0}, {4}));
  EXPECT_FALSE(is_tiling({8}, {}, {}));
  EXPECT_TRUE(is_tiling({8}, {0, 0}, {8, 8}));  // twice is once
  EXPECT_TRUE(is_tiling({8}, {3, 0}, {0, 8}));
  EXPECT_TRUE(is_tiling({0}, {}, {}));
}

TEST(Tiling, NumbersThatCannotBe) {
  EXPECT_FALSE(is_tiling({8}, {-1, 4}, {5, 4}));
  EXPECT_FALSE(is_tiling({8}, {0, 4}, {4, 5}));
  EXPECT_FALSE(is_tiling({8}, {INT64_MAX}, {INT64_MAX}));
  EXPECT_FALSE(is_tiling({8}, {0}, {-8}));
  EXPECT_THROW(is_tiling({8, 8}, {0}, {8}), std::invalid_argument);
  EXPECT_THROW(is_tiling({8}, {0, 4}, {8}), std::invalid_argument);
  EXPECT_THROW(is_tiling({}, {}, {}), std::invalid_argument);
}

// Five boxes around each other, of which no line cuts off one.
TEST(Tiling, Pinwheel) {
  const std::vector<int64_t> offsets{0, 0, 0, 2, 2, 1, 1, 0, 1, 1};
  const std::vector<int64_t> sizes{1, 2, 2, 1, 1, 2, 2, 1, 1, 1};
  EXPECT_TRUE(is_tiling({3, 3}, offsets, sizes));
  EXPECT_FALSE(
      is_tiling({3, 3}, {offsets.begin(), offsets.end() - 2}, {sizes.begin(), sizes.end() - 2}));
}

TEST(Tiling, AsCounted) {
  Random random(3);
  size_t filled = 0;
  for (int round = 0; round < 3000; ++round) {
    const int64_t height = 1 + static_cast<int64_t>(below(random, 3));
    const int64_t width = 1 + static_cast<int64_t>(below(random, 3));
    std::vector<int64_t> offsets, sizes;
    std::vector<int> counts(static_cast<size_t>(height * width));
    std::vector<std::vector<int64_t>> seen;
    for (uint64_t i = 1 + below(random, 4); i > 0; --i) {
      const auto y = static_cast<int64_t>(below(random, static_cast<uint64_t>(height)));
      const auto x = static_cast<int64_t>(below(random, static_cast<uint64_t>(width)));
      const auto rows = static_cast<int64_t>(below(random, static_cast<uint64_t>(height - y) + 1));
      const auto columns =
          static_cast<int64_t>(below(random, static_cast<uint64_t>(width - x) + 1));
      offsets.insert(offsets.end(), {y, x});
      sizes.insert(sizes.end(), {rows, columns});
      const std::vector<int64_t> box{y, x, rows, columns};
      if (std::find(seen.begin(), seen.end(), box) != seen.end()) continue;
      seen.push_back(box);
      for (int64_t row = y; row < y + rows; ++row) {
        for (int64_t column = x; column < x + columns; ++column) {
          ++counts[static_cast<size_t>(row * width + column)];
        }
      }
    }
    const bool expected =
        std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
    EXPECT_EQ(is_tiling({height, width}, offsets, sizes), expected);
    filled += expected ? 1 : 0;
  }
  EXPECT_GT(filled, 50u);
}

// Each dimension takes stack, and a file can name any number of them.
TEST(Tiling, TensorsOfMoreDimensionsThanTorchHasAreRefused) {
  for (const size_t dimensions : {65u, 100'000u}) {
    std::vector<int64_t> size(dimensions, 1), offsets(2 * dimensions), sizes(2 * dimensions, 1);
    size.back() = 3;
    sizes[dimensions - 1] = sizes.back() = 2;
    offsets.back() = 1;
    EXPECT_THROW(is_tiling(size, offsets, sizes), std::invalid_argument);
  }
}

}  // namespace
}  // namespace pyckpt
