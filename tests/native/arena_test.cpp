// The arena: who gets which memory, and that none is lost. And the mappings that it is made of.
#include "arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "error.h"
#include "pinned_buffer.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

constexpr size_t kPage = 4096;
constexpr size_t kSegment = 2 << 20;
constexpr auto kPrivate = Arena::Kind::kPrivate;
constexpr auto kShared = Arena::Kind::kShared;

std::shared_ptr<Region> allocate(const std::shared_ptr<Arena>& arena, size_t size) {
  return arena->allocate(size, kPrivate);
}

// The thread sanitizer's own memory may come to lie there.
#ifndef __SANITIZE_THREAD__
// Buffers are not in a forked child, where other memory may come to their place.
TEST(PinnedBufferTest, AForkedChildKeepsWhatLiesInItsPlace) {
  auto buffer = std::make_unique<PinnedBuffer>(kSegment);
  EXPECT_EQ(in_child([&] {
              std::byte* const place = buffer->data();
              void* const own = ::mmap(place, kPage, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
              if (own != place) return 1;
              *place = std::byte{7};
              buffer.reset();
              return *place == std::byte{7} ? 0 : 2;
            }),
            0);
}
#endif

// A child that drops what it has of its parent's copies waited for ever for a mutex that another
// thread of the parent had held at the fork.
TEST(ArenaTest, RegionsGoInAForkedChildWhileTheParentUsesTheArena) {
  const auto arena = std::make_shared<Arena>(kSegment);
  auto region = allocate(arena, kPage);
  std::atomic<bool> over{false};
  std::thread user([&] {
    while (!over) allocate(arena, kPage);
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(in_child([&] {
                region.reset();
                return 0;
              }),
              0);
    if (HasFailure()) break;
  }
  over = true;
  user.join();
}

TEST(ArenaTest, FirstFitInWholePages) {
  const auto arena = std::make_shared<Arena>(kSegment);
  const auto a = allocate(arena, 1);
  const auto b = allocate(arena, kPage + 1);
  const auto c = allocate(arena, 0);
  EXPECT_EQ(a->size(), kPage);
  EXPECT_EQ(a->offset(), 0u);
  EXPECT_EQ(b->offset(), kPage);
  EXPECT_EQ(b->size(), 2 * kPage);
  EXPECT_EQ(c->offset(), 3 * kPage);
  EXPECT_EQ(b->data() - a->data(), static_cast<ptrdiff_t>(kPage));
  EXPECT_EQ(arena->used_bytes(), 4 * kPage);
  b->give_back();
  EXPECT_EQ(allocate(arena, kPage)->offset(), kPage);  // and back at once
  EXPECT_EQ(allocate(arena, 2 * kPage)->offset(), kPage);
  EXPECT_EQ(allocate(arena, 3 * kPage)->offset(), 4 * kPage);
  EXPECT_EQ(arena->held_bytes(), kSegment);
  EXPECT_EQ(arena->used_bytes(), 2 * kPage);
}

TEST(ArenaTest, RangesMergeWithBothNeighbours) {
  const std::vector<std::vector<size_t>> orders = {{0, 1, 2}, {2, 1, 0}, {0, 2, 1},
                                                   {1, 0, 2}, {1, 2, 0}, {2, 0, 1}};
  for (const std::vector<size_t>& order : orders) {
    const auto arena = std::make_shared<Arena>(kSegment);
    std::vector<std::shared_ptr<Region>> regions;
    for (int i = 0; i < 3; ++i) regions.push_back(allocate(arena, kPage));
    const auto rest = allocate(arena, kSegment - 3 * kPage);
    EXPECT_EQ(allocate(arena, 1), nullptr);
    for (const size_t i : order) regions[i].reset();
    const auto whole = allocate(arena, 3 * kPage);
    ASSERT_NE(whole, nullptr);
    EXPECT_EQ(whole->offset(), 0u);
  }
}

TEST(ArenaTest, GrowsToItsBudget) {
  const auto arena = std::make_shared<Arena>(2 * kSegment + kPage);
  EXPECT_EQ(arena->held_bytes(), 0u);
  const auto a = allocate(arena, kSegment);
  const auto b = allocate(arena, kSegment);
  EXPECT_EQ(arena->held_bytes(), 2 * kSegment);
  EXPECT_EQ(allocate(arena, kPage), nullptr);  // a segment is a huge page at least
  EXPECT_EQ(allocate(std::make_shared<Arena>(0), 1), nullptr);
  a->give_back();
  b->give_back();
  EXPECT_EQ(arena->held_bytes(), 2 * kSegment);
  EXPECT_EQ(allocate(arena, 2 * kSegment), nullptr);  // two segments are not one
}

TEST(ArenaTest, KindsAreApart) {
  const auto arena = std::make_shared<Arena>(2 * kSegment);
  const auto own = arena->allocate(kPage, kPrivate);
  const auto shared = arena->allocate(2 * kPage, kShared);
  const auto next = arena->allocate(kPage, kShared);
  EXPECT_EQ(own->descriptor(), -1);
  ASSERT_GE(shared->descriptor(), 0);
  EXPECT_EQ(next->descriptor(), shared->descriptor());
  EXPECT_EQ(next->offset(), 2 * kPage);
  // Another process would map it so.
  std::memcpy(next->data(), "hello", 6);
  void* const mapped = ::mmap(nullptr, next->segment_size(), PROT_READ | PROT_WRITE, MAP_SHARED,
                              next->descriptor(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_STREQ(static_cast<const char*>(mapped) + next->offset(), "hello");
  ::munmap(mapped, next->segment_size());
  EXPECT_EQ(arena->allocate(kSegment, kPrivate), nullptr);
}

TEST(ArenaTest, GivingBackTwiceIsOnce) {
  const auto arena = std::make_shared<Arena>(kSegment);
  auto a = allocate(arena, kPage);
  a->give_back();
  const auto b = allocate(arena, kPage);
  EXPECT_EQ(b->data(), a->data());
  a->give_back();
  a.reset();
  EXPECT_EQ(arena->used_bytes(), kPage);
  EXPECT_NE(allocate(arena, kPage)->data(), b->data());
}

TEST(ArenaTest, ARegionKeepsTheMemory) {
  auto arena = std::make_shared<Arena>(kSegment);
  const auto region = allocate(arena, kPage);
  arena.reset();
  std::memset(region->data(), 1, kPage);
  EXPECT_EQ(region->segment_size(), kSegment);
}

TEST(ArenaTest, Reserves) {
  const auto arena = std::make_shared<Arena>(3 * kSegment + kPage);
  arena->reserve(kSegment + 1, kPrivate, kNoDevice, true);
  EXPECT_EQ(arena->held_bytes(), 2 * kSegment);
  arena->reserve(2 * kSegment, kPrivate, kNoDevice, false);  // is there already
  EXPECT_EQ(arena->held_bytes(), 2 * kSegment);
  EXPECT_EQ(arena->used_bytes(), 0u);
  const auto whole = allocate(arena, 2 * kSegment);
  EXPECT_NE(whole, nullptr);  // in one piece
  arena->reserve(100 * kSegment, kPrivate, kNoDevice, false);
  EXPECT_EQ(arena->held_bytes(), 3 * kSegment);
  arena->reserve(100 * kSegment, kShared, kNoDevice, false);
  EXPECT_EQ(arena->held_bytes(), 3 * kSegment);
}

// Against a model: no two regions overlap, and what is free can be had.
TEST(ArenaTest, RandomlyManyTimes) {
  Random random(5);
  const auto arena = std::make_shared<Arena>(4 * kSegment);
  std::map<std::byte*, std::shared_ptr<Region>> live;
  size_t used = 0;
  for (int i = 0; i < 20000; ++i) {
    if (live.empty() || draw(random, 0, 2) != 0) {
      const size_t size = draw(random, 1, draw(random, 0, 20) == 0 ? kSegment : 20 * kPage);
      const auto region = allocate(arena, size);
      if (!region) {
        ASSERT_FALSE(live.empty());
        continue;
      }
      const auto after = live.lower_bound(region->data());
      if (after != live.end()) {
        ASSERT_LE(region->data() + region->size(), after->first);
      }
      if (after != live.begin()) {
        const auto before = std::prev(after);
        ASSERT_LE(before->first + before->second->size(), region->data());
      }
      used += region->size();
      live.emplace(region->data(), region);
    } else {
      const auto victim =
          std::next(live.begin(), static_cast<ptrdiff_t>(draw(random, 0, live.size() - 1)));
      used -= victim->second->size();
      live.erase(victim);
    }
    ASSERT_EQ(arena->used_bytes(), used);
  }
  live.clear();
  for (int i = 0; i < 4; ++i) live.emplace(nullptr, allocate(arena, kSegment));
  EXPECT_LE(arena->held_bytes(), 4 * kSegment);
}

TEST(ArenaTest, ManyThreads) {
  const auto arena = std::make_shared<Arena>(4 * kSegment);
  std::atomic<int> torn{0};
  parallelize(4, [&](size_t thread) {
    Random random(thread);
    for (int i = 0; i < 500; ++i) {
      const auto region = allocate(arena, draw(random, 1, 8 * kPage));
      if (!region) continue;
      auto* const value = reinterpret_cast<size_t*>(region->data());
      *value = thread;
      if (draw(random, 0, 1) == 0) std::this_thread::yield();
      if (*value != thread) ++torn;
      region->give_back();
    }
  });
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(arena->used_bytes(), 0u);
}

TEST(PinnedBufferTest, TouchedPagesAreThereAndStayAsTheyWere) {
  for (const bool shared : {false, true}) {
    PinnedBuffer buffer(kSegment, shared);
    std::memset(buffer.data() + kPage, 7, kPage);
    buffer.populate(0, 3 * kPage);
    unsigned char there[3] = {};
    ASSERT_EQ(::mincore(buffer.data(), 3 * kPage, there), 0);
    for (const unsigned char page : there) EXPECT_TRUE(page & 1);
    EXPECT_EQ(buffer.data()[kPage], std::byte{7});
    EXPECT_EQ(buffer.data()[0], std::byte{0});
  }
}

// By several threads.
TEST(PinnedBufferTest, PopulatesLargeRanges) {
  constexpr size_t kSize = 80 << 20;
  for (const bool shared : {false, true}) {
    PinnedBuffer buffer(kSize, shared);
    buffer.populate(kPage, kSize - 2 * kPage);
    std::vector<unsigned char> there(kSize / kPage);
    ASSERT_EQ(::mincore(buffer.data(), kSize, there.data()), 0);
    for (size_t i = 1; i + 1 < there.size(); ++i) ASSERT_TRUE(there[i] & 1) << i;
  }
}

// In pieces, until it is told to stop; what is there stays as it is.
TEST(PinnedBufferTest, WarmsUntilItIsToStop) {
  PinnedBuffer buffer(4 * kSegment);
  buffer.data()[kSegment] = std::byte{7};
  int asked = 0;
  EXPECT_FALSE(buffer.warm(kPage, buffer.size() - kPage, kNoDevice, [&] { return ++asked < 3; }));
  std::vector<unsigned char> there(buffer.size() / kPage);
  ASSERT_EQ(::mincore(buffer.data(), buffer.size(), there.data()), 0);
  EXPECT_TRUE(there[1] & 1);
  EXPECT_FALSE(there.back() & 1);
  EXPECT_TRUE(buffer.warm(kPage, buffer.size() - kPage, kNoDevice, [] { return true; }));
  ASSERT_EQ(::mincore(buffer.data(), buffer.size(), there.data()), 0);
  for (size_t i = 1; i < there.size(); ++i) ASSERT_TRUE(there[i] & 1) << i;
  EXPECT_EQ(buffer.data()[kSegment], std::byte{7});
}

TEST(PinnedBufferTest, MemoryThatCannotBeHadIsAnError) {
  PinnedBuffer buffer(64 << 20, /*shared=*/true);
  ASSERT_EQ(::ftruncate(buffer.descriptor(), 0), 0);
  EXPECT_THROW(buffer.populate(0, buffer.size()), IoError);
  EXPECT_THROW(buffer.warm(0, buffer.size(), kNoDevice, [] { return true; }), IoError);
}

TEST(PinnedBufferTest, SharedMemoryGoesWithItsBuffer) {
  int descriptor = -1;
  {
    const PinnedBuffer buffer(kSegment, true);
    descriptor = buffer.descriptor();
    EXPECT_EQ(::lseek(descriptor, 0, SEEK_END), static_cast<off_t>(kSegment));
  }
  EXPECT_EQ(::lseek(descriptor, 0, SEEK_END), -1);
}

}  // namespace
}  // namespace pyckpt
