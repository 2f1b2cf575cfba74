// What a pickle costs, told from its opcodes; and pickles of any bytes, which must be survived.
#include "pickle_scan.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

uint64_t below(Random& random, uint64_t end) { return draw(random, 0, end - 1); }
using namespace std::string_literals;

size_t scan(const std::string& pickle, uint32_t depth = 100, uint32_t work_per_byte = 64) {
  // On the heap and no longer than it is, so that a sanitizer sees a read beyond.
  const std::vector<std::byte> bytes(
      reinterpret_cast<const std::byte*>(pickle.data()),
      reinterpret_cast<const std::byte*>(pickle.data()) + pickle.size());
  return scan_pickle(bytes.data(), bytes.size(), {depth, work_per_byte});
}

TEST(PickleScan, StopsAtStop) {
  EXPECT_EQ(scan("\x80\x02}q\x00X\x01\x00\x00\x00"s
                 "aK\x01s.more"s),
            15u);
  EXPECT_THROW(scan("\x80\x02}"s), std::invalid_argument);
  EXPECT_THROW(scan(""s), std::invalid_argument);
}

TEST(PickleScan, Depth) {
  const auto tuples = [](int depth) { return ")" + std::string(depth - 1, '\x85') + "."; };
  EXPECT_EQ(scan(tuples(100)), 101u);
  EXPECT_THROW(scan(tuples(101)), std::invalid_argument);
}

TEST(PickleScan, WorkIsCountedAsOftenAsItIsMet) {
  // {doubled: None}, where doubled is (x, x) of (x, x) of ...
  const auto doubled = [](int times) {
    std::string pickle = "})";
    for (int i = 0; i < times; ++i) pickle += "2\x86";
    return pickle + "Ns.";
  };
  EXPECT_NO_THROW(scan(doubled(19)));  // a million values are not worth a thought
  EXPECT_THROW(scan(doubled(20)), std::invalid_argument);
  EXPECT_THROW(scan(doubled(99)), std::invalid_argument);  // and nothing overflows
}

TEST(PickleScan, MemoryOfWhatIsRemembered) {
  EXPECT_NO_THROW(scan("NNNr\x03\x00\x00\x00.NN"s));
  EXPECT_THROW(scan("NNNr\x04\x00\x00\x00.NN"s), std::invalid_argument);
  EXPECT_THROW(scan("Nh\x00."s), std::invalid_argument);
}

TEST(PickleScan, AnyBytes) {
  // Of the opcodes that there are, so that few end at once.
  const std::string opcodes =
      "(.0125FGIJKLMNRSTUVXaegdhjlpqrstub]})\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"
      "\x90\x91\x92\x93\x94\x95\x96QcBC\n\n000\x01\x02\x03"s;
  Random random(7);
  size_t whole = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string pickle;
    for (uint64_t i = below(random, 60); i > 0; --i)
      pickle += opcodes[below(random, opcodes.size())];
    try {
      scan(pickle);
      ++whole;
    } catch (const std::invalid_argument&) {
    }
  }
  EXPECT_GT(whole, 50u);
}

}  // namespace
}  // namespace pyckpt
