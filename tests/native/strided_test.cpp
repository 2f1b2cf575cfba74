// Strided reads against a walk over the elements one by one.
#include "strided.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  size_t item_size;

  int64_t count() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
  // Of the memory that its elements lie in.
  size_t extent() const {
    if (count() == 0) return 0;
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return (last + 1) * item_size;
  }
  std::string text() const {
    std::string text = std::to_string(item_size) + ":";
    for (size_t d = 0; d < sizes.size(); ++d) {
      text += " " + std::to_string(sizes[d]) + "@" + std::to_string(strides[d]);
    }
    return text;
  }
};

// The elements in row-major order, each found from its number alone.
std::string walk(const Shape& shape, const std::string& memory) {
  std::string bytes;
  for (int64_t number = 0; number < shape.count(); ++number) {
    int64_t rest = number, place = 0;
    for (size_t d = shape.sizes.size(); d-- > 0;) {
      place += rest % shape.sizes[d] * shape.strides[d];
      rest /= shape.sizes[d];
    }
    bytes += memory.substr(place * shape.item_size, shape.item_size);
  }
  return bytes;
}

// Memory of exactly the size, so that a sanitizer sees one byte too many on either side.
std::string gather(const Shape& shape, const std::vector<char>& memory, size_t begin, size_t size) {
  std::vector<std::byte> to(size);
  const Strided strided(shape.sizes, shape.strides, shape.item_size);
  strided.gather(to.data(), reinterpret_cast<const std::byte*>(memory.data()), begin, size);
  return {reinterpret_cast<const char*>(to.data()), size};
}

class Case {
 public:
  Case(Random& random, Shape shape) : shape_(std::move(shape)) {
    const std::string bytes = random_bytes(random, shape_.extent());
    memory_.assign(bytes.begin(), bytes.end());
    expected_ = walk(shape_, bytes);
  }
  size_t size() const { return expected_.size(); }
  void check(size_t begin, size_t size) const {
    ASSERT_EQ(difference(gather(shape_, memory_, begin, size), expected_.substr(begin, size)), "")
        << shape_.text() << " from " << begin << " size " << size;
  }

 private:
  Shape shape_;
  std::vector<char> memory_;
  std::string expected_;
};

void check_every_range(const Case& sample) {
  for (size_t begin = 0; begin < sample.size(); ++begin) {
    for (size_t size = 1; size <= sample.size() - begin; ++size) {
      ASSERT_NO_FATAL_FAILURE(sample.check(begin, size));
    }
  }
}

TEST(Strided, EveryRangeOfSmallOnes) {
  Random random(1);
  const std::vector<Shape> shapes = {
      {{}, {}, 4},                      // one number
      {{5}, {1}, 3},                    // dense
      {{5}, {2}, 1},                    // every second
      {{7}, {0}, 2},                    // expanded
      {{3, 4}, {4, 1}, 2},              // dense matrix
      {{4, 3}, {1, 4}, 2},              // transposed
      {{3, 4}, {6, 1}, 4},              // a part of wider rows
      {{3, 4}, {0, 1}, 2},              // rows repeated
      {{3, 4}, {1, 0}, 2},              // columns repeated
      {{2, 3, 4}, {12, 4, 1}, 1},       // dense
      {{2, 3, 4}, {24, 8, 2}, 2},       // every second of all
      {{2, 3, 4}, {1, 8, 2}, 2},        // permuted
      {{2, 1, 3}, {3, 999, 1}, 8},      // a dimension of one may have any stride
      {{3, 3}, {1, 1}, 4},              // overlapping rows
      {{2, 2, 2, 2}, {0, 1, 0, 2}, 1},  // some of them repeated
      {{2, 3, 2}, {40, 10, 3}, 16},     // each of the sizes that are copied at once
      {{2, 3, 2}, {40, 10, 3}, 8},      //
      {{2, 2, 3}, {100, 10, 1}, 5},     // runs of 15 bytes
      {{1, 1, 1}, {7, 8, 9}, 4},        // nothing but ones
      {{2, 3, 4}, {100, 4, 1}, 2},      // two inner dimensions that are one
      {{2, 3, 4}, {100, 8, 2}, 2},      // the same, with gaps
      {{3, 2, 2}, {4, 2, 1}, 1},        // all one
      {{4, 2, 2}, {8, 4, 1}, 2},        // outer two are one, with gaps inside
  };
  for (const Shape& shape : shapes) check_every_range(Case(random, shape));
}

TEST(Strided, RandomShapes) {
  Random random(2);
  for (int round = 0; round < 400; ++round) {
    Shape shape;
    shape.item_size = std::vector<size_t>{1, 2, 4, 8, 16, 3}[draw(random, 0, 5)];
    const size_t dimensions = draw(random, 0, 4);
    for (size_t d = 0; d < dimensions; ++d) {
      shape.sizes.push_back(draw(random, 1, 5));
      shape.strides.push_back(draw(random, 0, 7));
    }
    if (draw(random, 0, 1) == 1) {  // permuted dense ones, where neighbours merge
      std::vector<size_t> order(dimensions);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      int64_t stride = draw(random, 1, 2);
      for (const size_t d : order) {
        shape.strides[d] = stride;
        stride *= shape.sizes[d];
      }
    }
    const Case sample(random, shape);
    ASSERT_NO_FATAL_FAILURE(sample.check(0, sample.size()));
    for (int range = 0; range < 20; ++range) {
      const size_t begin = draw(random, 0, sample.size() - 1);
      ASSERT_NO_FATAL_FAILURE(sample.check(begin, draw(random, 1, sample.size() - begin)));
    }
  }
}

TEST(Strided, LargeOneInPieces) {
  Random random(3);
  const Case sample(random, {{37, 61, 53}, {1, 37, 37 * 61}, 4});
  for (size_t begin = 0; begin < sample.size();) {
    const size_t size = std::min<size_t>(draw(random, 1, 50000), sample.size() - begin);
    ASSERT_NO_FATAL_FAILURE(sample.check(begin, size));
    begin += size;
  }
}

TEST(Strided, NothingOfAnEmptyOne) {
  Random random(4);
  for (const Shape& shape : std::vector<Shape>{{{0}, {1}, 4}, {{0, 3}, {3, 1}, 4}}) {
    EXPECT_EQ(gather(shape, {}, 0, 0), "") << shape.text();
  }
}

}  // namespace
}  // namespace pyckpt
