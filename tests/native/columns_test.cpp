// Columns: a table of keys and chunks, and what is found in it.
#include "columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace pyckpt {
namespace {

using Numbers = std::vector<int64_t>;

const Properties kFloat = {"float32", "torch.strided", false, 0, false};

uint32_t add_tensor(Columns* columns, const std::string& name, const Numbers& size) {
  return columns->add_tensor(name, columns->add_properties(kFloat), size.data(), size.size());
}

TEST(Columns, HoldsKeysAndItems) {
  Columns columns;
  const uint32_t object = columns.add_object("step");
  const uint32_t tensor = add_tensor(&columns, "weight", {4, 6});
  const uint64_t first = columns.add_chunk(Numbers{0, 0}.data(), Numbers{2, 6}.data());
  const uint64_t second = columns.add_chunk(Numbers{2, 0}.data(), Numbers{2, 6}.data());
  const uint32_t scalar = add_tensor(&columns, "", {});
  columns.add_chunk(nullptr, nullptr);

  EXPECT_EQ(columns.key_count(), 3u);
  EXPECT_EQ(columns.item_count(), 4u);
  EXPECT_EQ(columns.find("step"), object);
  EXPECT_EQ(columns.find("weight"), tensor);
  EXPECT_EQ(columns.find(""), scalar);
  EXPECT_EQ(columns.find("weigh"), Columns::kNone);
  EXPECT_FALSE(columns.is_tensor(object));
  EXPECT_EQ(columns.items_of(tensor), 2u);
  EXPECT_EQ(columns.first_item(tensor), first);
  EXPECT_EQ(second, first + 1);
  EXPECT_EQ(Numbers(columns.size(tensor), columns.size(tensor) + 2), (Numbers{4, 6}));
  EXPECT_EQ(columns.chunk_offsets(tensor, 1)[0], 2);
  EXPECT_EQ(columns.chunk_sizes(tensor, 1)[1], 6);
  EXPECT_EQ(columns.properties_count(), 1u);
  EXPECT_TRUE(columns.properties(columns.properties_of(scalar)) == kFloat);
}

TEST(Columns, AKeyThatIsAddedAfterALookUpIsFound) {
  Columns columns;
  columns.add_object("a");
  EXPECT_EQ(columns.find("b"), Columns::kNone);
  const uint32_t added = columns.add_object("b");
  EXPECT_EQ(columns.find("b"), added);
  EXPECT_EQ(columns.find("a"), 0u);
}

TEST(Columns, HoldsPlaces) {
  Columns columns;
  columns.add_object("object");
  add_tensor(&columns, "tensor", {3});
  const uint64_t item = columns.add_chunk(Numbers{0}.data(), Numbers{3}.data());
  columns.add_file("__0_0.distcp");
  const uint32_t file = columns.add_file("__1_0.distcp");
  columns.set_place(0, {0, 5, 10, false, 0, 0, 0});
  columns.set_place(item, {file, 4096, 700, true, 64, 12, 0xffffffff});
  columns.set_stride(item, {1});

  EXPECT_FALSE(columns.place(0).is_recorded);
  const ItemPlace place = columns.place(item);
  EXPECT_TRUE(place.is_recorded);
  EXPECT_EQ(std::tuple(place.offset, place.length, place.payload_offset, place.payload_length),
            std::tuple(4096u, 700u, 64u, 12u));
  EXPECT_EQ(place.crc32, 0xffffffffu);
  EXPECT_EQ(columns.stride(0), nullptr);
  EXPECT_EQ(*columns.stride(item), (Numbers{1}));
  EXPECT_EQ(columns.file_sizes(), (std::vector<uint64_t>{15, 4796}));
  EXPECT_THROW(columns.set_place(2, {}), std::out_of_range);
  EXPECT_THROW(columns.set_place(0, {2, 0, 0, false, 0, 0, 0}), std::out_of_range);
  columns.set_file_name(0, "other");
  EXPECT_EQ(columns.file_name(columns.place(0).file), "other");
}

TEST(Columns, AChunkIsOfATensor) {
  Columns columns;
  EXPECT_THROW(columns.add_chunk(nullptr, nullptr), std::logic_error);
  columns.add_object("object");
  EXPECT_THROW(columns.add_chunk(nullptr, nullptr), std::logic_error);
}

// A tensor that is cut into a grid at random places, its chunks in any order.
class Grid {
 public:
  Grid(std::mt19937& random, const Numbers& size, size_t cuts) : size_(size) {
    std::vector<Numbers> edges;
    for (const int64_t extent : size) {
      Numbers of{0, extent};
      for (size_t i = 0; i < cuts && extent > 0; ++i) {
        of.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(extent)));
      }
      std::sort(of.begin(), of.end());
      edges.push_back(of);
    }
    std::vector<size_t> at(size.size());
    for (;;) {
      std::pair<Numbers, Numbers> box;
      for (size_t d = 0; d < size.size(); ++d) {
        box.first.push_back(edges[d][at[d]]);
        box.second.push_back(edges[d][at[d] + 1] - edges[d][at[d]]);
      }
      boxes_.push_back(box);
      size_t d = 0;
      while (d < size.size() && ++at[d] + 1 == edges[d].size()) at[d++] = 0;
      if (d == size.size()) break;
    }
    std::shuffle(boxes_.begin(), boxes_.end(), random);
  }

  uint32_t add_to(Columns* columns) const {
    const uint32_t key = add_tensor(columns, "grid", size_);
    for (const auto& [offsets, sizes] : boxes_) columns->add_chunk(offsets.data(), sizes.data());
    return key;
  }

  const std::vector<std::pair<Numbers, Numbers>>& boxes() const { return boxes_; }

 private:
  Numbers size_;
  std::vector<std::pair<Numbers, Numbers>> boxes_;
};

TEST(Columns, FindsTheOverlapsThatAreThere) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    Numbers size(random() % 4);
    for (int64_t& extent : size) extent = static_cast<int64_t>(random() % 30);
    const Grid grid(random, size, random() % 6);
    Columns columns;
    columns.add_object("before");
    const uint32_t key = grid.add_to(&columns);
    for (int i = 0; i < 10; ++i) {
      Numbers offsets, sizes;
      for (const int64_t extent : size) {
        offsets.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(extent + 1)));
        sizes.push_back(
            static_cast<int64_t>(random() % static_cast<uint64_t>(extent - offsets.back() + 1)));
      }
      std::vector<Overlap> expected;
      for (size_t chunk = 0; chunk < grid.boxes().size(); ++chunk) {
        const auto& [from, extent] = grid.boxes()[chunk];
        Overlap overlap;
        overlap.item = columns.first_item(key) + chunk;
        bool is_empty = false;
        for (size_t d = 0; d < size.size(); ++d) {
          const int64_t begin = std::max(from[d], offsets[d]);
          const int64_t end = std::min(from[d] + extent[d], offsets[d] + sizes[d]);
          is_empty = is_empty || end <= begin;
          overlap.in_stored.push_back(begin - from[d]);
          overlap.in_wanted.push_back(begin - offsets[d]);
          overlap.size.push_back(end - begin);
        }
        if (!is_empty) expected.push_back(overlap);
      }
      const std::vector<Overlap> found = columns.overlaps(key, offsets.data(), sizes.data());
      ASSERT_EQ(found.size(), expected.size());
      for (size_t n = 0; n < found.size(); ++n) {
        EXPECT_EQ(found[n].item, expected[n].item);
        EXPECT_EQ(found[n].in_stored, expected[n].in_stored);
        EXPECT_EQ(found[n].in_wanted, expected[n].in_wanted);
        EXPECT_EQ(found[n].size, expected[n].size);
      }
    }
  }
}

TEST(Columns, FindsAChunkByWhereItBegins) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    Numbers size(random() % 4);
    for (int64_t& extent : size) extent = static_cast<int64_t>(random() % 20);
    const Grid grid(random, size, random() % 5);
    Columns columns;
    const uint32_t key = grid.add_to(&columns);
    for (size_t chunk = 0; chunk < grid.boxes().size(); ++chunk) {
      const Numbers& offsets = grid.boxes()[chunk].first;
      for (const uint64_t hint : {uint64_t{chunk}, uint64_t{0}, UINT64_MAX}) {
        const auto found = columns.find_chunk(key, offsets.data(), hint);
        ASSERT_TRUE(found.has_value());
        EXPECT_EQ(grid.boxes()[*found].first, offsets);
      }
      EXPECT_EQ(columns.find_chunk(key, offsets.data(), chunk), chunk);
    }
    const Numbers nowhere(size.size(), 1000);
    if (!size.empty()) {
      EXPECT_FALSE(columns.find_chunk(key, nowhere.data()).has_value());
    }
  }
}

}  // namespace
}  // namespace pyckpt
