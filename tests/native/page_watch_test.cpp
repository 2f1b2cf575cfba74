// What the kernel says of pages that were written, where it says it.
#include "page_watch.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "error.h"

namespace pyckpt::test {
namespace {

constexpr size_t kSize = 1 << 20;

// Memory of a mapping of its own, all of it there.
class Mapping {
 public:
  explicit Mapping(int flags = MAP_PRIVATE)
      : data_(static_cast<std::byte*>(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                                             flags | MAP_ANONYMOUS | MAP_POPULATE, -1, 0))) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(data_, kSize); }

  std::byte* data() const { return data_; }

 private:
  std::byte* const data_;
};

class PageWatchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      watch_.emplace();
    } catch (const IoError& error) {
      GTEST_SKIP() << error.message();
    }
  }

  std::optional<PageWatch> watch_;
};

TEST_F(PageWatchTest, NoticesWritesOfOtherThreads) {
  const Mapping memory;
  const uint64_t since = watch_->watch(memory.data(), kSize);
  ASSERT_NE(since, 0U);
  EXPECT_TRUE(watch_->is_unwritten(memory.data(), kSize, since));
  std::thread([&] { memory.data()[kSize / 2] = std::byte{1}; }).join();
  EXPECT_FALSE(watch_->is_unwritten(memory.data(), kSize, since));
  EXPECT_NE(watch_->watch(memory.data(), kSize), since);
  EXPECT_FALSE(watch_->is_unwritten(memory.data(), kSize, since));
}

TEST_F(PageWatchTest, RefusesWhatOthersMayWrite) {
  const Mapping shared(MAP_SHARED);
  EXPECT_EQ(watch_->watch(shared.data(), kSize), 0U);
  const Mapping memory;
  ASSERT_NE(watch_->watch(memory.data(), kSize), 0U);
  EXPECT_EQ(PageWatch().watch(memory.data(), kSize), 0U);
}

// Other memory comes to the same place, and another watch has that: the kernel says only that pages
// are watched, and not by whom.
TEST_F(PageWatchTest, DoesNotTakeAnotherWatchForItsOwn) {
  PageWatch other;
  const Mapping memory;
  const uint64_t since = watch_->watch(memory.data(), kSize);
  ASSERT_NE(since, 0U);
  ASSERT_EQ(::mmap(memory.data(), kSize, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_FIXED, -1, 0),
            memory.data());
  memory.data()[0] = std::byte{1};
  ASSERT_NE(other.watch(memory.data(), kSize), 0U);
  EXPECT_FALSE(watch_->is_unwritten(memory.data(), kSize, since));
}

TEST_F(PageWatchTest, GivenBackMemoryIsNotUnwritten) {
  const Mapping memory;
  const uint64_t since = watch_->watch(memory.data(), kSize);
  ASSERT_EQ(::madvise(memory.data() + (64 << 10), 64 << 10, MADV_DONTNEED), 0);
  EXPECT_FALSE(watch_->is_unwritten(memory.data(), kSize, since));
  EXPECT_EQ(watch_->watch(memory.data(), kSize), 0U);  // before it is there again
}

TEST_F(PageWatchTest, ForgetsWhatOverlaps) {
  const Mapping memory;
  const uint64_t since = watch_->watch(memory.data(), kSize);
  const uint64_t later = watch_->watch(memory.data() + 1, kSize - 1);
  EXPECT_FALSE(watch_->is_unwritten(memory.data(), kSize, since));
  EXPECT_TRUE(watch_->is_unwritten(memory.data() + 1, kSize - 1, later));
  memory.data()[0] = std::byte{1};  // beside it, in a page that is partly its own
  EXPECT_TRUE(watch_->is_unwritten(memory.data() + 1, kSize - 1, later));
  memory.data()[1] = std::byte{1};
  EXPECT_FALSE(watch_->is_unwritten(memory.data() + 1, kSize - 1, later));
}

TEST_F(PageWatchTest, KnowsNothingInAChild) {
  const Mapping memory;
  const uint64_t since = watch_->watch(memory.data(), kSize);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool knows = watch_->is_unwritten(memory.data(), kSize, since) ||
                       watch_->watch(memory.data(), kSize) != 0;
    watch_->close();
    ::_exit(knows ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(watch_->is_unwritten(memory.data(), kSize, since));
}

TEST_F(PageWatchTest, MayBeAskedByManyThreads) {
  const Mapping memory;
  std::vector<std::thread> threads;
  constexpr size_t kShare = kSize / 4;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, part = memory.data() + i * kShare] {
      for (int round = 0; round < 20; ++round) {
        const uint64_t since = watch_->watch(part, kShare);
        EXPECT_TRUE(watch_->is_unwritten(part, kShare, since));
        part[round] = std::byte{1};
        EXPECT_FALSE(watch_->is_unwritten(part, kShare, since));
        watch_->forget(part, since);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace pyckpt::test
