// Blocks of plans, and the plan that is made of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "columns.h"
#include "crc32.h"
#include "global_plan.h"
#include "packed.h"
#include "place_block.h"
#include "plan_block.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

using Numbers = std::vector<int64_t>;

constexpr uint64_t kFloat = 4;

PlanProperties floats() { return {{"float32", "torch.strided", false, 0, false}, kFloat}; }

// A rank's block, of shards and whole tensors of floats, and objects.
class Block {
 public:
  Block() { properties_ = packer_.add_properties(floats()); }
  Block& shard(const std::string& name, const Numbers& shape, const Numbers& offsets,
               const Numbers& sizes) {
    packer_.add_tensor(name, {}, true, properties_, shape, offsets, sizes, std::nullopt);
    return *this;
  }
  Block& tensor(const std::string& name, const Numbers& shape) {
    packer_.add_tensor(name, {}, false, properties_, shape, Numbers(shape.size()), shape,
                       std::nullopt);
    return *this;
  }
  Block& object(const std::string& name, const std::vector<PathPart>& path = {}) {
    packer_.add_object(name, path, std::nullopt);
    return *this;
  }
  std::string bytes() const { return packer_.finish(); }

 private:
  PlanPacker packer_;
  uint32_t properties_;
};

std::vector<GlobalPlan::Rank> ranks_of(const std::vector<std::string>& blocks) {
  std::vector<GlobalPlan::Rank> ranks;
  for (const std::string& block : blocks) ranks.push_back({block, std::nullopt});
  return ranks;
}

std::string error_of(const std::vector<std::string>& blocks) {
  const GlobalPlan plan(ranks_of(blocks));
  EXPECT_TRUE(plan.conflicts().empty());
  return plan.errors().empty() ? "" : plan.errors().front();
}

// --- blocks
// ---------------------------------------------------------------------------------------

TEST(PlanBlock, HoldsWhatWasPacked) {
  PlanPacker packer;
  const uint32_t properties = packer.add_properties(floats());
  packer.add_tensor("model.weight", {{5, false}, {6, false}}, true, properties, {7, 3, 2},
                    {4, 0, 1}, {3, 3, 1}, 12);
  packer.add_object("list.10", {{4, false}, {2, true}}, std::nullopt);
  packer.add_tensor("scalar", {}, false, properties, {}, {}, {}, std::nullopt);
  packer.add_tensor("model.weight", {{5, false}, {6, false}}, true, properties, {7, 3, 2},
                    {0, 0, 0}, {4, 3, 2}, std::nullopt);
  packer.add_path("elsewhere", {{9, false}});
  const std::string bytes = packer.finish();
  PlanBlock::Tables tables;
  const PlanBlock block(bytes, &tables);
  const KeyTable& keys = *block.keys();
  ASSERT_EQ(block.size(), 4U);
  ASSERT_EQ(keys.size(), 4U);
  EXPECT_EQ(keys.name(block.key(0)), "model.weight");
  EXPECT_EQ(keys.kind(block.key(0)), PlanKind::kShard);
  EXPECT_EQ(Numbers(block.offsets(0), block.offsets(0) + 3), (Numbers{4, 0, 1}));
  EXPECT_EQ(Numbers(block.sizes(0), block.sizes(0) + 3), (Numbers{3, 3, 1}));
  EXPECT_EQ(Numbers(keys.shape(0), keys.shape(0) + 3), (Numbers{7, 3, 2}));
  EXPECT_EQ(keys.weight(block.key(0)), 7 * 3 * 2 * kFloat);
  EXPECT_EQ(keys.properties(block.key(0)).properties, floats().properties);
  EXPECT_EQ(block.hint(0), 12);
  EXPECT_EQ(keys.name(block.key(1)), "list.10");
  EXPECT_EQ(keys.kind(block.key(1)), PlanKind::kObject);
  EXPECT_TRUE(keys.parts(block.key(1))[1].is_number);
  EXPECT_EQ(keys.weight(block.key(1)), 1U);
  EXPECT_EQ(keys.dims(block.key(2)), 0U);
  EXPECT_EQ(block.key(3), block.key(0));
  EXPECT_EQ(block.hint(3), std::nullopt);
  EXPECT_EQ(keys.kind(3), PlanKind::kPathOnly);
}

TEST(PlanBlock, RefusesWhatItCannotHold) {
  EXPECT_THROW(Block().object("a").object("a"), std::invalid_argument);
  EXPECT_THROW(Block().tensor("a", {3}).tensor("a", {3}), std::invalid_argument);
  EXPECT_THROW(Block().object("a").shard("a", {3}, {0}, {3}), std::invalid_argument);
  EXPECT_THROW(Block().shard("a", {3}, {0}, {1}).shard("a", {3}, {0}, {2}), std::invalid_argument);
  EXPECT_THROW(Block().shard("a", {3}, {0, 0}, {1, 1}), std::invalid_argument);
  EXPECT_THROW(Block().tensor("a", {INT64_MAX, 2}), std::invalid_argument);
  EXPECT_THROW(Block().object("a.b", {{1, false}, {2, false}}), std::invalid_argument);
  EXPECT_THROW(Block().object("a.07", {{1, false}, {2, true}}), std::invalid_argument);
  EXPECT_THROW(Block().object("a.b", {{1, false}, {1, true}}), std::invalid_argument);
}

TEST(PlanBlock, EachDamagedByteIsNoticed) {
  const std::string bytes = Block().shard("a.b", {300, 4}, {7, 0}, {200, 4}).object("c").bytes();
  PlanBlock::Tables tables;
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    EXPECT_THROW(PlanBlock(damaged, &tables), std::invalid_argument) << at;
    EXPECT_THROW(PlanBlock(bytes.substr(0, at), &tables), std::invalid_argument) << at;
  }
}

// What somebody made, checksum and all, is looked at as closely.
TEST(PlanBlock, BytesOfAnySortAreRefusedOrRead) {
  Random random(5);
  const std::string good = Block().shard("a.b", {300, 4}, {7, 0}, {200, 4}).object("c").bytes();
  const std::string body(unseal(PackedKind::kPlan, good));
  size_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string changed = body;
    for (uint64_t i = draw(random, 1, 3); i > 0; --i) {
      changed[draw(random, 0, changed.size() - 1)] = static_cast<char>(draw(random, 0, 255));
    }
    if (draw(random, 0, 3) == 0) changed.resize(draw(random, 0, changed.size()));
    const std::string sealed = seal(PackedKind::kPlan, changed);
    try {
      const GlobalPlan plan(ranks_of({sealed, good}));
      if (plan.conflicts().empty() && plan.errors().empty()) plan.paths();
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5000U);
}

TEST(PlanBlock, SaysWhatIsWrong) {
  // As a pyckpt of another version seals it.
  const std::string bytes = Block().object("a").bytes();
  std::string other = bytes.substr(0, bytes.size() - sizeof(uint32_t));
  other[std::string("pyckpt").size()] = 9;
  Packer checksum;
  checksum.word(crc32(0, other.data(), other.size()));
  other += checksum.bytes();
  std::string damaged = bytes;
  damaged.back() ^= 1;
  const auto message = [&](const std::string& of_rank) {
    try {
      GlobalPlan{ranks_of({bytes, of_rank})};
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message(other).find("rank 1 is packed as version 9"), std::string::npos);
  EXPECT_NE(message(damaged).find("rank 1 is damaged"), std::string::npos);
  EXPECT_NE(message("").find("rank 1 is not what pyckpt packs"), std::string::npos);
  EXPECT_NE(message(pack_checksums({1, 2})).find("rank 1 is something else"), std::string::npos);
}

// --- merging
// --------------------------------------------------------------------------------------

TEST(GlobalPlan, OneRankWritesEachPart) {
  const GlobalPlan plan(ranks_of({
      Block().object("o").shard("s", {4}, {0}, {2}).tensor("r", {100}).bytes(),
      Block().object("o").shard("s", {4}, {2}, {2}).tensor("r", {100}).object("own").bytes(),
  }));
  ASSERT_TRUE(plan.conflicts().empty());
  ASSERT_TRUE(plan.errors().empty());
  const Columns& columns = *plan.columns();
  ASSERT_EQ(columns.key_count(), 4U);
  EXPECT_EQ(columns.name(0), "o");
  EXPECT_EQ(columns.name(1), "s");
  EXPECT_EQ(columns.name(2), "r");
  EXPECT_EQ(columns.name(3), "own");
  EXPECT_EQ(columns.items_of(1), 2U);
  EXPECT_EQ(columns.chunk_offsets(1, 1)[0], 2);
  // Rank 0 has the object and its shard to write, rank 1 only its shard.
  EXPECT_EQ(unpack_answer(plan.answer(0), 3), (std::vector<uint32_t>{1, 1, 0}));
  EXPECT_EQ(unpack_answer(plan.answer(1), 4), (std::vector<uint32_t>{0, 2, 1, 1}));
  EXPECT_EQ(plan.written(0), 2U);
  EXPECT_EQ(plan.item(1, 0), 2U);
  EXPECT_EQ(plan.wrote(1), std::string("\0\1\1\1", 4));
  EXPECT_THROW(unpack_answer(plan.answer(1), 5), std::invalid_argument);
}

TEST(GlobalPlan, WhoWroteItGoesOn) {
  const std::string block = Block().tensor("a", {10}).tensor("b", {10}).bytes();
  const std::string none("\0\0", 2), second("\0\1", 2), first("\1\0", 2);
  const auto writers = [&](std::vector<std::optional<std::string_view>> wrote) {
    std::vector<GlobalPlan::Rank> ranks;
    for (const auto& mask : wrote) ranks.push_back({block, mask});
    const GlobalPlan plan(ranks);
    std::string who(2, '?');
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (size_t item = 0; item < 2; ++item) {
        if (plan.wrote(rank)[item] != 0) who[item] = static_cast<char>('0' + rank);
      }
    }
    return who;
  };
  EXPECT_EQ(writers({std::nullopt, std::nullopt}), "01");
  EXPECT_EQ(writers({std::nullopt, first, second}), "12");
  EXPECT_EQ(writers({none, std::nullopt}), "11");  // the other one may have staged nothing
  EXPECT_EQ(writers({none, none}), "01");          // though neither did
  EXPECT_THROW(GlobalPlan({{block, std::string_view("\0", 1)}}), std::invalid_argument);
}

TEST(GlobalPlan, ChunksThatAreNotOneTensor) {
  const auto two = [](const Numbers& shape, const Numbers& a, const Numbers& sizes_a,
                      const Numbers& b, const Numbers& sizes_b) {
    return error_of({Block().shard("the.key", shape, a, sizes_a).bytes(),
                     Block().shard("the.key", shape, b, sizes_b).bytes()});
  };
  EXPECT_EQ(two({4}, {0}, {2}, {2}, {2}), "");
  EXPECT_EQ(two({4}, {0}, {4}, {4}, {0}), "");
  EXPECT_EQ(two({4, 4}, {0, 0}, {4, 2}, {0, 2}, {4, 2}), "");
  for (const std::string& error : {
           two({4}, {0}, {2}, {2}, {3}),
           two({4}, {0}, {4}, {-1}, {0}),
           two({4}, {0}, {4}, {INT64_MAX}, {INT64_MAX}),
       }) {
    EXPECT_EQ(error.find("key:the.key has out of bounds chunk"), 0U) << error;
  }
  for (const std::string& error : {
           two({4}, {0}, {3}, {2}, {2}),
           two({4}, {0}, {4}, {2}, {0}),  // DCP counts it as lying within
           two({4, 4}, {0, 0}, {3, 3}, {2, 2}, {2, 2}),
       }) {
    EXPECT_EQ(error.find("key:the.key has overlapping chunks"), 0U) << error;
  }
  for (const std::string& error : {
           two({5}, {0}, {2}, {2}, {2}),
           two({4, 4}, {0, 0}, {2, 2}, {2, 2}, {2, 2}),
       }) {
    EXPECT_EQ(error.find("key:the.key invalid fill"), 0U) << error;
  }
  // Alone, a rank may save a part.
  EXPECT_EQ(error_of({Block().shard("s", {5}, {0}, {2}).bytes()}), "");
  EXPECT_NE(error_of({Block().shard("s", {5}, {0}, {2}).shard("s", {5}, {1}, {2}).bytes()}), "");
}

TEST(GlobalPlan, OneKeyOfSeveralKinds) {
  const GlobalPlan shapes(
      ranks_of({Block().tensor("a", {3}).bytes(), Block().shard("a", {4}, {0}, {4}).bytes()}));
  EXPECT_EQ(shapes.conflicts(),
            std::vector<std::string>{
                "a is a tensor of shape (3,) on rank 0 and a tensor of shape (4,) on 1"});
  const GlobalPlan kinds(ranks_of(
      {Block().object("a").bytes(), Block().object("a").bytes(), Block().tensor("a", {}).bytes()}));
  EXPECT_EQ(kinds.conflicts(),
            std::vector<std::string>{"a is an object on rank 0 and a tensor of shape () on 2"});
  const GlobalPlan lists(ranks_of({Block().object("l.0", {{1, false}, {1, true}}).bytes(),
                                   Block().object("l.1", {{1, false}, {1, true}}).bytes()}));
  EXPECT_EQ(lists.conflicts(), std::vector<std::string>{"l has 1 entries on rank 0 and 2 on 1"});
  // Of one shape, one in parts and one whole.
  EXPECT_EQ(error_of({Block().shard("a", {4}, {2}, {2}).bytes(), Block().tensor("a", {4}).bytes()}),
            "key:a is planned by ranks 0 and 1, and not as shards of one tensor");
}

// Chunks of grids with a random part missing or repeated, against counting each element.
TEST(GlobalPlan, GridsAsCounted) {
  Random random(11);
  size_t fine = 0;
  for (int round = 0; round < 1500; ++round) {
    const int64_t height = static_cast<int64_t>(draw(random, 1, 6));
    const int64_t width = static_cast<int64_t>(draw(random, 1, 6));
    std::vector<Block> blocks(draw(random, 2, 5));
    std::set<Numbers> seen;
    std::vector<int> counts(static_cast<size_t>(height * width));
    const auto add = [&](const Numbers& at, const Numbers& of) {
      if (of[0] == 0 || of[1] == 0 || !seen.insert(at).second) return;
      blocks[draw(random, 0, blocks.size() - 1)].shard("k", {height, width}, at, of);
      for (int64_t y = at[0]; y < at[0] + of[0]; ++y) {
        for (int64_t x = at[1]; x < at[1] + of[1]; ++x)
          ++counts[static_cast<size_t>(y * width + x)];
      }
    };
    const auto cut = [&](int64_t end) {
      return static_cast<int64_t>(draw(random, 0, static_cast<uint64_t>(end)));
    };
    const int64_t y = cut(height), x = cut(width), other = draw(random, 0, 1) == 0 ? x : cut(width);
    const uint64_t missing = draw(random, 0, 9);
    if (missing != 0) add({0, 0}, {y, x});
    if (missing != 1) add({0, x}, {y, width - x});
    if (missing != 2) add({y, 0}, {height - y, other});
    if (missing != 3) add({y, other}, {height - y, width - other});
    if (missing == 4) add({y / 2, x / 2}, {height - y / 2, width - x / 2});
    std::vector<std::string> bytes;
    for (const Block& block : blocks) bytes.push_back(block.bytes());
    const bool expected = seen.empty() || std::all_of(counts.begin(), counts.end(),
                                                      [](int count) { return count == 1; });
    EXPECT_EQ(error_of(bytes).empty(), expected) << round;
    fine += expected;
  }
  EXPECT_GT(fine, 300U);
  EXPECT_LT(fine, 1400U);
}

TEST(GlobalPlan, PathsAsDcpJoinsThem) {
  const GlobalPlan plan(ranks_of({
      Block().object("a.0", {{1, false}, {1, false}}).object("b", {{1, false}}).bytes(),
      Block().object("c", {{1, false}}).object("a.0", {{1, false}, {1, false}}).bytes(),
  }));
  std::vector<std::string> names;
  for (const auto& [keys, key] : plan.paths()) names.emplace_back(keys->name(key));
  EXPECT_EQ(names, (std::vector<std::string>{"c", "a.0", "b"}));
}

// --- results
// --------------------------------------------------------------------------------------

std::vector<PlacedItem> some_places() {
  std::vector<PlacedItem> items(3);
  items[0].place = {0, 0, 700, true, 600, 90, 0xdeadbeef};
  items[1].place = {0, 4096, 1000, true, 512, 400, 7};
  items[1].stride = {1, 10};
  items[2].place = {0, 5096, 50, false, 0, 0, 0};
  return items;
}

TEST(PlaceBlock, HoldsWhatWasPacked) {
  const std::vector<PlacedItem> items = some_places();
  const std::string bytes = pack_places(items);
  const std::vector<PlacedItem> found = unpack_places(bytes);
  ASSERT_EQ(found.size(), items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(found[i].place.offset, items[i].place.offset);
    EXPECT_EQ(found[i].place.length, items[i].place.length);
    EXPECT_EQ(found[i].place.is_recorded, items[i].place.is_recorded);
    EXPECT_EQ(found[i].place.payload_offset, items[i].place.payload_offset);
    EXPECT_EQ(found[i].place.payload_length, items[i].place.payload_length);
    EXPECT_EQ(found[i].place.crc32, items[i].place.crc32);
    EXPECT_EQ(found[i].stride, items[i].stride);
  }
  EXPECT_EQ(unpack_checksums(pack_checksums({1, UINT32_MAX})),
            (std::vector<uint32_t>{1, UINT32_MAX}));
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_THROW(unpack_places(damaged), std::invalid_argument) << at;
  }
}

TEST(PlaceBlock, SaysWhereThePlanLies) {
  GlobalPlan plan(ranks_of({
      Block().shard("s", {4}, {0}, {2}).bytes(),
      Block().shard("s", {4}, {2}, {2}).object("a").object("b").bytes(),
      Block().object("a").bytes(),
  }));
  ASSERT_EQ(plan.written(1), 2U);  // rank 2 has less to write
  std::vector<PlacedItem> items = some_places();
  items.resize(2);
  plan.place(1, "one", pack_places(items));
  EXPECT_THROW(plan.place(1, "one", pack_places(some_places())), std::invalid_argument);
  const Columns& columns = *plan.columns();
  const ItemPlace place = columns.place(plan.item(1, 1));
  EXPECT_EQ(place.offset, 4096U);
  EXPECT_EQ(columns.file_name(place.file), "one");
  EXPECT_EQ(*columns.stride(plan.item(1, 1)), (Numbers{1, 10}));
  plan.check(1, "two", pack_checksums({8, 9}));
  EXPECT_EQ(columns.place(plan.item(1, 1)).crc32, 9U);
  EXPECT_EQ(columns.place(plan.item(1, 1)).offset, 4096U);
  EXPECT_EQ(columns.file_name(place.file), "two");
  EXPECT_THROW(plan.check(1, "two", pack_checksums({8})), std::invalid_argument);
  // Where it lies in row-major order now.
  items[1].stride.clear();
  plan.place(1, "three", pack_places(items));
  EXPECT_EQ(columns.stride(plan.item(1, 1)), nullptr);
}

}  // namespace
}  // namespace pyckpt
