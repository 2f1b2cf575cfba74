// Many small copies in one launch: what the kernel's threads do, and how copies are given to them.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_support.h"
#include "error.h"
#include "pack.h"

namespace pyckpt {
namespace {

using namespace test;

// Sanitizers see whether all is read and written as it is aligned, and nothing beside it.
TEST(PackTest, CopiesWhateverTheAlignment) {
  Random random(3);
  const std::string bytes = random_bytes(random, 400);
  alignas(16) char to[400];
  alignas(16) char from[400];
  std::copy(bytes.begin(), bytes.end(), from);
  for (const unsigned threads : {1, 3, 64}) {
    for (size_t to_skew = 0; to_skew < 16; ++to_skew) {
      for (size_t from_skew = 0; from_skew < 16; ++from_skew) {
        for (const size_t size : {0, 1, 3, 15, 16, 17, 31, 33, 64, 100, 333}) {
          std::fill(std::begin(to), std::end(to), '?');
          const Transfer transfer{reinterpret_cast<std::byte*>(to + to_skew),
                                  reinterpret_cast<const std::byte*>(from + from_skew), size};
          for (unsigned thread = 0; thread < threads; ++thread) {
            copy_chunk(transfer, thread, threads);
          }
          std::string expected(sizeof(to), '?');
          expected.replace(to_skew, size, bytes.substr(from_skew, size));
          ASSERT_EQ(std::string(to, sizeof(to)), expected)
              << size << " bytes from " << from_skew << " to " << to_skew;
        }
      }
    }
  }
}

class PackCudaTest : public CudaTest {
 protected:
  // Stages tensors of these sizes, at odd addresses; returns how many copies each launch had.
  std::vector<size_t> launches(Engine* engine, const std::vector<size_t>& sizes) {
    const auto device = engine->cuda_device(0);
    const size_t before = cuda_.launches().size();
    std::vector<StageSource> sources;
    std::vector<std::string> expected;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t skew = i % 19;
      expected.push_back(random_bytes(random_, sizes[i]));
      std::byte* const memory = on_device(0, std::string(skew, ' ') + expected.back());
      sources.push_back(source(device, memory + skew, sizes[i], true));
    }
    const auto job = stage(engine, sources, {{device, cuda_.make_stream(0)}});
    job->wait();
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(difference(staged_bytes(*job, i), expected[i]), "");
    }
    const std::vector<size_t> all = cuda_.launches();
    return {all.begin() + static_cast<ptrdiff_t>(before), all.end()};
  }
};

// Two are enough to keep all blocks busy.
TEST_F(PackCudaTest, BlocksShareLargeCopies) {
  Engine engine(small());
  const size_t size = 2 << 20;
  const auto counts = launches(&engine, {size, size});
  ASSERT_EQ(counts.size(), 1u);
  // A copy that does not begin where a chunk does has a short one at each end.
  EXPECT_GE(counts[0], 2 * size / kPackChunk);
  EXPECT_LE(counts[0], 2 * (size / kPackChunk + 1));
  EXPECT_EQ(launches(&engine, {kPackChunk, 1}), (std::vector<size_t>{2}));
}

TEST_F(PackCudaTest, WhatIsLargerIsLeftToTheCopyEngine) {
  Engine engine(small());
  const size_t before = cuda_.calls("cudaMemcpyAsync");
  EXPECT_EQ(launches(&engine, {(2 << 20) + 1, 3 << 20}), (std::vector<size_t>{}));
  // A copy is two where a registration ends within it. The memory of both is smaller than the piece
  // that is registered at a time, so that one may.
  const size_t copies = cuda_.calls("cudaMemcpyAsync") - before;
  EXPECT_TRUE(copies == 2 || copies == 3) << copies;
}

// Those before release 530, which say so at the first launch alone.
TEST_F(PackCudaTest, DriversThatTakeFewParameters) {
  cuda_.set_parameter_limit(4096);
  Engine engine(small());
  engine.prewarm(1, Arena::Kind::kPrivate, {0});
  const std::vector<size_t> sizes(2 * kPackTransfersSmall + 1, 100);
  const std::vector<size_t> expected = {kPackTransfersSmall, kPackTransfersSmall, 1};
  EXPECT_EQ(launches(&engine, sizes), expected);
  EXPECT_EQ(cuda_.calls("cudaLaunchKernel"), 4u);
  EXPECT_EQ(launches(&engine, sizes), expected);
  EXPECT_EQ(cuda_.calls("cudaLaunchKernel"), 7u);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// The other kernel is not tried again for an error of another kind.
TEST_F(PackCudaTest, OtherErrorsAreErrors) {
  Engine engine(small());
  cuda_.fail("cudaLaunchKernel", 1, cudaErrorMemoryAllocation);
  EXPECT_THROW(launches(&engine, std::vector<size_t>(200, 10)), CudaError);
  EXPECT_EQ(cuda_.calls("cudaLaunchKernel"), 1u);
  EXPECT_TRUE(cuda_.heal());
  EXPECT_EQ(launches(&engine, std::vector<size_t>(200, 10)), (std::vector<size_t>{200}));
}

// An error that the program has not asked for yet is neither ours nor taken from it.
TEST_F(PackCudaTest, ErrorsOfOthersStayTheirs) {
  Engine engine(small());
  EXPECT_EQ(cudaSetDevice(9), cudaErrorInvalidDevice);
  EXPECT_EQ(launches(&engine, {10, 10}), (std::vector<size_t>{2}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

}  // namespace
}  // namespace pyckpt
