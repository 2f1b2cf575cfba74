// Host memory and CUDA: registered in pieces, near the device, while others go on.
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_support.h"
#include "error.h"
#include "numa.h"
#include "pinned_buffer.h"

namespace pyckpt {
namespace {

using namespace test;

constexpr auto kPrivate = Arena::Kind::kPrivate;
constexpr size_t kSegment = 2 << 20;

class RegisterCudaTest : public CudaTest {};

TEST_F(RegisterCudaTest, PiecesEndAtTheSameAddresses) {
  PinnedBuffer buffer(2 * kRegistrationPiece + kSegment);
  buffer.pin(0);
  const auto pieces = cuda_.registrations();
  EXPECT_GE(pieces.size(), 3u);
  const std::byte* at = buffer.data();
  for (const auto& [data, size] : pieces) {
    EXPECT_EQ(data, at);
    EXPECT_LE(size, kRegistrationPiece);
    at += size;
    const bool last = at == buffer.data() + buffer.size();
    EXPECT_TRUE(last || reinterpret_cast<uintptr_t>(at) % kRegistrationPiece == 0);
  }
  EXPECT_EQ(at, buffer.data() + buffer.size());
}

// In both directions, and whatever the kernel copies.
TEST_F(RegisterCudaTest, CopiesAreWithinOneRegistration) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  constexpr size_t kSize = kRegistrationPiece + (4 << 20);
  PinnedBuffer buffer(kSize);
  buffer.pin(0);
  const std::string bytes = random_bytes(random_, kSize);
  std::byte* const memory = on_device(0, bytes);
  device->copy_to_host({{buffer.data(), memory, kSize}})->wait();
  EXPECT_EQ(difference(bytes_at(buffer.data(), kSize), bytes), "");
  std::byte* const back = cuda_.allocate(0, kSize);
  device->copy_from_host({{back, buffer.data(), kSize}})->wait();
  EXPECT_EQ(difference(bytes_at(back, kSize), bytes), "");
  // Two small ones, of which the second lies on a border.
  const auto address = reinterpret_cast<uintptr_t>(buffer.data());
  const size_t border = kRegistrationPiece - address % kRegistrationPiece;
  device
      ->copy_to_host({{buffer.data(), memory, 10},
                      {buffer.data() + border - 50, memory, 100},
                      {buffer.data() + border - 600001, memory + 3, 500000}})
      ->wait();
  EXPECT_EQ(bytes_at(buffer.data() + border - 50, 100), bytes.substr(0, 100));
}

// Another attempt goes on from there.
TEST_F(RegisterCudaTest, ARefusedPieceIsAnError) {
  PinnedBuffer buffer(3 * kRegistrationPiece);
  cuda_.set_registration_limit(2 * kRegistrationPiece);
  EXPECT_THROW(buffer.pin(0), CudaError);
  const size_t there = cuda_.live_registrations();
  EXPECT_GE(there, 1u);
  EXPECT_THROW(buffer.pin(0), CudaError);
  EXPECT_EQ(cuda_.live_registrations(), there);
  cuda_.set_registration_limit(SIZE_MAX);
  buffer.pin(0);
  const auto pieces = cuda_.registrations();
  EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                            [](size_t sum, const auto& piece) { return sum + piece.second; }),
            buffer.size());
}

// CUDA would make the pages one by one.
TEST_F(RegisterCudaTest, PagesAreThereBeforeTheyAreRegistered) {
  PinnedBuffer buffer(8 << 20);
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  auto pin = beside([&] { buffer.pin(0); });
  EXPECT_TRUE(cuda_.blocked(1));
  std::vector<unsigned char> there(buffer.size() / 4096);
  ASSERT_EQ(::mincore(buffer.data(), buffer.size(), there.data()), 0);
  for (const unsigned char page : there) ASSERT_TRUE(page & 1);
  gate.set_value();
  pin.get();
}

// Some of them are asked by threads that have the GIL.
TEST_F(RegisterCudaTest, AnArenaThatGrowsAnswersMeanwhile) {
  const auto arena = std::make_shared<Arena>(2 * kSegment);
  const auto first = arena->allocate(kSegment / 4 * 3, kPrivate);
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  auto grow = beside([&] { EXPECT_TRUE(arena->allocate(kSegment / 2, kPrivate, 0)); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(arena->held_bytes(), 2 * kSegment);
  EXPECT_EQ(arena->used_bytes(), first->size());
  EXPECT_TRUE(arena->allocate(4096, kPrivate));
  // What has no room yet waits for the memory that is being made, instead of being told that there
  // is none.
  std::atomic<pid_t> id{0};
  auto next = beside([&] {
    id = static_cast<pid_t>(::syscall(SYS_gettid));
    EXPECT_TRUE(arena->allocate(kSegment / 2, kPrivate));
  });
  while (id == 0) std::this_thread::yield();
  wait_until_asleep(id);
  gate.set_value();
  grow.get();
  next.get();
}

// As above, where the memory is there and was not registered.
TEST_F(RegisterCudaTest, AnArenaThatRegistersAnswersMeanwhile) {
  const auto arena = std::make_shared<Arena>(kSegment);
  arena->allocate(kSegment, kPrivate)->give_back();
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  auto pin = beside([&] { arena->reserve(4096, kPrivate, 0, true); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(arena->used_bytes(), 0u);
  EXPECT_TRUE(arena->allocate(4096, kPrivate));
  gate.set_value();
  pin.get();
}

// As above, by whoever takes it.
TEST_F(RegisterCudaTest, AnArenaThatHandsOutWhatItRegistersAnswersMeanwhile) {
  const auto arena = std::make_shared<Arena>(kSegment);
  arena->allocate(kSegment, kPrivate)->give_back();
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  auto take = beside([&] { EXPECT_TRUE(arena->allocate(4096, kPrivate, 0)); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(arena->used_bytes(), 4096u);
  EXPECT_TRUE(arena->allocate(4096, kPrivate));
  gate.set_value();
  take.get();
}

// Whoever needs the memory does not wait for it.
TEST_F(RegisterCudaTest, WhatIsWarmedCanBePinnedMeanwhile) {
  PinnedBuffer buffer(3 * kRegistrationPiece);
  std::promise<void> reached, gate;
  int asked = 0;
  auto warm = beside([&] {
    EXPECT_TRUE(buffer.warm(0, buffer.size(), 0, [&] {
      if (++asked == 2) {
        reached.set_value();
        gate.get_future().wait();
      }
      return true;
    }));
  });
  reached.get_future().wait();
  buffer.pin(0);
  const auto pieces = cuda_.registrations();
  EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                            [](size_t sum, const auto& piece) { return sum + piece.second; }),
            buffer.size());
  gate.set_value();
  warm.get();
  EXPECT_EQ(cuda_.registrations().size(), pieces.size());
}

// Each piece by one of them.
TEST_F(RegisterCudaTest, SeveralThreadsPinOneBuffer) {
  PinnedBuffer buffer(4 * kRegistrationPiece);
  buffer.populate(0, buffer.size());
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  std::atomic<pid_t> ids[3] = {};
  std::vector<std::future<void>> pins;
  for (std::atomic<pid_t>& id : ids) {
    pins.push_back(beside([&buffer, &id, warms = &id == &ids[2]] {
      id = static_cast<pid_t>(::syscall(SYS_gettid));
      if (warms) {
        buffer.warm(0, buffer.size(), 0, [] { return true; });
      } else {
        buffer.pin(0);
      }
    }));
  }
  EXPECT_TRUE(cuda_.blocked(1));
  for (const std::atomic<pid_t>& id : ids) {
    while (id == 0) std::this_thread::yield();
    wait_until_asleep(id);
  }
  gate.set_value();
  for (auto& pin : pins) pin.get();
  const std::byte* at = buffer.data();
  for (const auto& [data, size] : cuda_.registrations()) {
    EXPECT_EQ(data, at);
    at += size;
  }
  EXPECT_EQ(at, buffer.data() + buffer.size());
}

// It waits for what the thread is at, and for nothing that comes after that.
TEST_F(RegisterCudaTest, ClosingAnEngineGivesUpWhatItPrewarms) {
  Engine engine(small());
  std::promise<void> gate;
  cuda_.hold_registration(gate.get_future().share());
  engine.prewarm_later(2 * kSegment, kPrivate, {0});
  EXPECT_TRUE(cuda_.blocked(1));  // at the ring
  std::atomic<pid_t> id{0};
  std::atomic<bool> is_open{false};
  auto close = beside([&] {
    id = static_cast<pid_t>(::syscall(SYS_gettid));
    engine.close();
    EXPECT_TRUE(is_open);
  });
  while (!engine.closed()) std::this_thread::yield();
  wait_until_asleep(id);
  is_open = true;
  gate.set_value();
  close.get();
  EXPECT_EQ(cuda_.live_registrations(), 1u);
}

// The save meets the error, and tells of it.
TEST_F(RegisterCudaTest, WhatCannotBePrewarmedIsLeftToTheSave) {
  Engine engine(small());
  cuda_.set_registration_limit(0);
  engine.prewarm_later(kSegment, kPrivate, {0});
  engine.wait_prewarmed();
  EXPECT_EQ(cuda_.live_registrations(), 0u);
  EXPECT_THROW(engine.arena().allocate(kSegment, kPrivate, 0), CudaError);
  cuda_.set_registration_limit(SIZE_MAX);
  EXPECT_TRUE(engine.arena().allocate(kSegment, kPrivate, 0));
}

TEST_F(RegisterCudaTest, PrewarmsInTheBackground) {
  Engine engine(small());
  engine.prewarm_later(2 * kSegment, kPrivate, {1});
  engine.wait_prewarmed();
  EXPECT_EQ(cuda_.contexts(), (std::set<int>{1}));
  const size_t before = cuda_.calls("cudaHostRegister");
  EXPECT_GE(before, 2u);  // the ring and the arena
  EXPECT_TRUE(engine.arena().allocate(2 * kSegment, kPrivate, 1));
  EXPECT_EQ(cuda_.calls("cudaHostRegister"), before);
}

// A piece is registered with the device of the first one, whichever device the thread is at.
TEST_F(RegisterCudaTest, ADeviceThatGoesOnRegisteringKeepsItsQueues) {
  Engine engine({1 << 20, kRegistrationPiece / (1 << 20) + 1, 2, 16 << 20});  // two pieces
  cuda_.fail("cudaHostRegister", 2);
  EXPECT_THROW(engine.cuda_device(0)->prepare(), CudaError);
  EXPECT_TRUE(cuda_.heal());
  const auto device = engine.cuda_device(1);
  device->prepare();
  PinnedBuffer buffer(kSegment);
  buffer.pin(1);
  const std::string bytes = random_bytes(random_, 3000);
  std::byte* const memory = on_device(1, bytes);
  // A launch and a mark, which CUDA takes for a stream of the current device alone.
  device->copy_to_host({{buffer.data(), memory, 1000}, {buffer.data() + 1000, memory + 1000, 2000}})
      ->wait();
  EXPECT_EQ(bytes_at(buffer.data(), bytes.size()), bytes);
}

TEST_F(RegisterCudaTest, MemoryKnowsWhetherCudaIsAskedWhenItGoes) {
  const auto arena = std::make_shared<Arena>(4 * kSegment);
  const auto region = arena->allocate(kSegment, kPrivate);
  EXPECT_FALSE(region->arena_uses_device());
  arena->reserve(kSegment, kPrivate, kNoDevice, true);
  EXPECT_FALSE(region->arena_uses_device());
  for (const Arena::Range& range : arena->free_ranges(kPrivate)) {
    EXPECT_TRUE(range.buffer->warm(range.offset, range.size, 1, [] { return true; }));
  }
  EXPECT_TRUE(region->arena_uses_device());
  const auto other = std::make_shared<Arena>(kSegment);
  EXPECT_TRUE(other->allocate(kSegment, kPrivate, 0)->arena_uses_device());
  EXPECT_TRUE(cuda_.live_registrations() > 0);
}

class NumaTest : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    for (size_t i = path.find('/'); i != std::string::npos; i = path.find('/', i + 1)) {
      ::mkdir(root_.file(path.substr(0, i)).c_str(), 0700);
    }
    std::ofstream(root_.file(path)) << text << "\n";
  }
  int node_of(const std::string& address) { return node_of_pci_device(address, root_.file("sys")); }

  TempDirectory root_;
};

TEST_F(NumaTest, FindsTheNodeOfADevice) {
  EXPECT_EQ(node_of("0000:3b:00.0"), -1);  // nothing is known
  write("sys/devices/system/node/online", "0-1");
  write("sys/bus/pci/devices/0000:3b:00.0/numa_node", "1");
  write("sys/bus/pci/devices/0000:af:00.0/numa_node", "-1");
  EXPECT_EQ(node_of("0000:3b:00.0"), 1);
  EXPECT_EQ(node_of("0000:af:00.0"), -1);
  EXPECT_EQ(node_of("0000:00:00.0"), -1);
  EXPECT_EQ(node_of(""), -1);
  write("sys/devices/system/node/online", "0");  // of one node nothing is to be asked
  EXPECT_EQ(node_of("0000:3b:00.0"), -1);
}

TEST_F(NumaTest, PrefersANode) {
  PinnedBuffer buffer(kSegment);
  prefer_node(buffer.data(), buffer.size(), -1);  // none
  int mode = -1;
  unsigned long nodes[16] = {};
  const auto policy = [&] {
    return ::syscall(SYS_get_mempolicy, &mode, nodes, 1024, buffer.data(), MPOL_F_ADDR);
  };
  if (policy() != 0) GTEST_SKIP() << "the system lets nobody ask";
  EXPECT_EQ(mode, MPOL_DEFAULT);
  prefer_node(buffer.data(), buffer.size(), 0);
  ASSERT_EQ(policy(), 0);
  EXPECT_EQ(mode, MPOL_PREFERRED);
  EXPECT_EQ(nodes[0], 1u);
}

}  // namespace
}  // namespace pyckpt
