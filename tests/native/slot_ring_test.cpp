// The ring: the order of its slots, what happens when it is empty, and what close does.
#include "slot_ring.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "error.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

constexpr size_t kSlotBytes = 4096;

// A thread that waits for a slot. `asleep` returns once it does.
class Waiter {
 public:
  explicit Waiter(SlotRing* ring)
      : thread_([this, ring] {
          id_.store(static_cast<pid_t>(::syscall(SYS_gettid)));
          try {
            slot_ = ring->acquire(&waited_);
          } catch (const EngineClosed&) {
            closed_ = true;
          }
        }) {}
  ~Waiter() { join(); }

  void asleep() {
    while (id_.load() == 0) std::this_thread::yield();
    wait_until_asleep(id_.load());
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  // After `join`.
  Slot& slot() { return slot_; }
  bool waited() const { return waited_; }
  bool closed() const { return closed_; }

 private:
  std::atomic<pid_t> id_{0};
  Slot slot_;
  bool waited_ = false;
  bool closed_ = false;
  std::thread thread_;  // last: it uses what stands above
};

Slot take(SlotRing* ring) {
  bool waited = true;
  Slot slot = ring->acquire(&waited);
  EXPECT_FALSE(waited);
  return slot;
}

TEST(SlotRing, SlotsAreApartAndAligned) {
  SlotRing ring(3, 2 * kSlotBytes);
  EXPECT_EQ(ring.slots(), 3u);
  EXPECT_EQ(ring.slot_bytes(), 2 * kSlotBytes);
  std::vector<Slot> slots;
  std::set<std::byte*> places;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(take(&ring));
    ASSERT_TRUE(slots.back());
    std::byte* data = slots.back().data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
    for (const std::byte* other : places) EXPECT_GE(std::abs(data - other), 2 * 4096);
    places.insert(data);
    data[0] = data[2 * kSlotBytes - 1] = std::byte{1};  // all of it may be used
  }
  EXPECT_EQ(places.size(), 3u);
}

TEST(SlotRing, HandedOutInTheOrderTheyCameBack) {
  SlotRing ring(3, kSlotBytes);
  Slot a = take(&ring), b = take(&ring), c = take(&ring);
  std::byte* const first = b.data();
  std::byte* const second = c.data();
  std::byte* const third = a.data();
  b.release();
  c.release();
  a.release();
  Slot again = take(&ring);
  EXPECT_EQ(again.data(), first);
  Slot more = take(&ring);
  EXPECT_EQ(more.data(), second);
  again.release();  // goes behind the third
  Slot last = take(&ring);
  EXPECT_EQ(last.data(), third);
  EXPECT_EQ(take(&ring).data(), first);
}

TEST(SlotRing, TryAcquireTakesAllAndThenNone) {
  SlotRing ring(2, kSlotBytes);
  Slot a = ring.try_acquire();
  Slot b = ring.try_acquire();
  EXPECT_TRUE(a);
  EXPECT_TRUE(b);
  EXPECT_NE(a.data(), b.data());
  EXPECT_FALSE(ring.try_acquire());
  std::byte* const data = b.data();
  b.release();
  EXPECT_FALSE(b);
  EXPECT_EQ(ring.try_acquire().data(), data);  // and gives it back at the end of this line
  EXPECT_TRUE(ring.try_acquire());
}

TEST(SlotRing, ASlotIsGivenBackOnce) {
  SlotRing ring(2, kSlotBytes);
  {
    Slot a = ring.try_acquire();
    Slot b = std::move(a);
    EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what a move leaves is what is tested
    EXPECT_TRUE(b);
    a.release();
    a = std::move(b);
    EXPECT_TRUE(a);
    EXPECT_FALSE(b);
    Slot c = ring.try_acquire();
    EXPECT_FALSE(ring.try_acquire());
    a = std::move(c);  // gives back what `a` had
    EXPECT_TRUE(ring.try_acquire());
    Slot& same = a;
    a = std::move(same);
    EXPECT_TRUE(a);
  }
  Slot a = ring.try_acquire(), b = ring.try_acquire();
  EXPECT_TRUE(a && b);
  EXPECT_FALSE(ring.try_acquire());
}

TEST(SlotRing, AWaiterGetsWhatComesBack) {
  SlotRing ring(1, kSlotBytes);
  Slot slot = take(&ring);
  std::byte* const data = slot.data();
  Waiter waiter(&ring);
  waiter.asleep();
  slot.release();
  waiter.join();
  EXPECT_EQ(waiter.slot().data(), data);
  EXPECT_TRUE(waiter.waited());
}

TEST(SlotRing, CloseWakesAllWaiters) {
  SlotRing ring(1, kSlotBytes);
  Slot slot = take(&ring);
  {
    Waiter first(&ring), second(&ring), third(&ring);
    for (Waiter* waiter : {&first, &second, &third}) waiter->asleep();
    ring.close();
    for (Waiter* waiter : {&first, &second, &third}) {
      waiter->join();
      EXPECT_TRUE(waiter->closed());
      EXPECT_FALSE(waiter->slot());
    }
  }
  slot.release();  // still allowed, and of no use to anyone
  bool waited = true;
  EXPECT_THROW(static_cast<void>(ring.acquire(&waited)), EngineClosed);
  EXPECT_FALSE(waited);
  EXPECT_FALSE(ring.try_acquire());
  ring.close();
}

// Each slot has one user at a time, and none is lost.
TEST(SlotRing, ManyThreads) {
  constexpr size_t kSlots = 3, kThreads = 8, kTurns = 2000;
  SlotRing ring(kSlots, kSlotBytes);
  std::atomic<size_t> users{0}, users_max{0}, turns{0};
  parallelize(kThreads, [&](size_t i) {
    for (size_t turn = 0; turn < kTurns; ++turn) {
      bool waited;
      Slot slot = (turn + i) % 4 == 0 ? ring.try_acquire() : Slot();
      if (!slot) slot = ring.acquire(&waited);
      const size_t now = users.fetch_add(1) + 1;
      size_t before = users_max.load();
      while (before < now && !users_max.compare_exchange_weak(before, now)) {
      }
      // Not atomic: a sanitizer, or the sum, tells of two users.
      auto* count = reinterpret_cast<uint64_t*>(slot.data());
      ++*count;
      users.fetch_sub(1);
      turns.fetch_add(1);
    }
  });
  EXPECT_EQ(turns.load(), kThreads * kTurns);
  EXPECT_LE(users_max.load(), kSlots);
  uint64_t sum = 0;
  std::vector<Slot> all;
  for (size_t i = 0; i < kSlots; ++i) {
    all.push_back(ring.try_acquire());
    ASSERT_TRUE(all.back());
    sum += *reinterpret_cast<uint64_t*>(all.back().data());
  }
  EXPECT_EQ(sum, kThreads * kTurns);
  EXPECT_FALSE(ring.try_acquire());
}

}  // namespace
}  // namespace pyckpt
