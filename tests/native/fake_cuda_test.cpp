// The fake runtime itself: that it orders what CUDA orders and nothing else, and that it tells.
#include "fake_cuda.h"

#include <gtest/gtest.h>

#include <future>
#include <set>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt::test {
namespace {

class FakeCudaTest : public testing::Test {
 protected:
  cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync) {
    cudaEvent_t event;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, flags), cudaSuccess);
    return event;
  }

  void say(cudaStream_t stream, const std::string& what) {
    cuda_.enqueue(stream, [this, what] { said_ += what; });
  }

  // What streams did so far.
  std::string said() {
    cuda_.settle();
    return said_;
  }

  FakeCuda cuda_{2};
  const cudaStream_t a_ = cuda_.make_stream(0);
  const cudaStream_t b_ = cuda_.make_stream(0);
  std::string said_;
};

TEST_F(FakeCudaTest, StreamsAreInOrderAndApart) {
  cuda_.hold(a_);
  say(a_, "1");
  say(a_, "2");
  say(b_, "3");
  EXPECT_EQ(said(), "3");
  cuda_.step(a_);
  EXPECT_EQ(said(), "31");
  cuda_.release(a_);
  EXPECT_EQ(said(), "312");
}

TEST_F(FakeCudaTest, AWaitIsForTheRecordThatWasThereAtTheCall) {
  const cudaEvent_t event = make_event();
  cudaStreamWaitEvent(b_, event, 0);  // never recorded: nothing to wait for
  say(b_, "1");
  EXPECT_EQ(said(), "1");
  cuda_.hold(a_);
  cudaEventRecord(event, a_);
  cudaStreamWaitEvent(b_, event, 0);
  say(b_, "2");
  EXPECT_EQ(said(), "1");
  // Another record changes nothing for those that wait already.
  say(a_, "x");
  cudaEventRecord(event, a_);
  cuda_.step(a_);
  EXPECT_EQ(said(), "12");
  cudaStreamWaitEvent(b_, event, 0);
  say(b_, "3");
  EXPECT_EQ(said(), "12");
  cuda_.release(a_);
  EXPECT_EQ(said(), "12x3");
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cuda_.finish(), "");
}

TEST_F(FakeCudaTest, TheHostWaitsForAnEventOrAStream) {
  const cudaEvent_t event = make_event();
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);  // never recorded
  say(a_, "1");
  cudaEventRecord(event, a_);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(said_, "1");
  say(a_, "2");
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  EXPECT_EQ(said_, "12");
  EXPECT_EQ(cuda_.program_waits(), 3u);
  cudaEventDestroy(event);
}

// Streams made without cudaStreamNonBlocking and the default stream wait for each other.
TEST_F(FakeCudaTest, TheDefaultStreamAndBlockingStreams) {
  cudaStream_t blocking;
  ASSERT_EQ(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), cudaSuccess);
  cuda_.hold(blocking);
  say(blocking, "1");
  say(cuda_.default_stream(0), "2");
  say(cuda_.default_stream(1), "3");  // another device's
  EXPECT_EQ(said(), "3");
  say(a_, "4");
  EXPECT_EQ(said(), "34");
  cuda_.hold(cuda_.default_stream(0));
  cuda_.release(blocking);
  say(blocking, "5");
  EXPECT_EQ(said(), "341");
  cuda_.release(cuda_.default_stream(0));
  EXPECT_EQ(said(), "34125");
  cudaStreamDestroy(blocking);
}

TEST_F(FakeCudaTest, ShufflesStreams) {
  std::set<std::string> orders;
  for (unsigned seed = 0; seed < 20; ++seed) {
    cuda_.shuffle(seed);
    cuda_.hold(a_);
    cuda_.hold(b_);
    said_.clear();
    for (const char* what : {"1", "2", "3"}) say(a_, what);
    for (const char* what : {"x", "y", "z"}) say(b_, what);
    cuda_.release_all();
    orders.insert(said());
  }
  EXPECT_GT(orders.size(), 5u);
}

TEST_F(FakeCudaTest, FailsOnce) {
  cuda_.fail("cudaEventCreateWithFlags", 2, cudaErrorMemoryAllocation);
  const cudaEvent_t first = make_event();
  cudaEvent_t second;
  EXPECT_EQ(cudaEventCreateWithFlags(&second, 0), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const cudaEvent_t third = make_event();
  EXPECT_TRUE(cuda_.heal());
  EXPECT_FALSE(cuda_.heal());
  cudaEventDestroy(first);
  cudaEventDestroy(third);
  EXPECT_EQ(cuda_.finish(), "");
}

TEST_F(FakeCudaTest, ALostDeviceDoesNothingMore) {
  const cudaEvent_t event = make_event();
  cuda_.hold(a_);
  say(a_, "1");
  cudaEventRecord(event, a_);
  auto waiter = std::async(std::launch::async, [&] { return cudaEventSynchronize(event); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.lose(0);
  EXPECT_EQ(waiter.get(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventRecord(event, a_), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(said(), "");
  cudaEventDestroy(event);
}

TEST_F(FakeCudaTest, TellsOfMisuse) {
  std::vector<std::byte> host(4096);
  std::byte* const device = cuda_.allocate(0, 4096);
  cuda_.hold(a_);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), device, 4096, cudaMemcpyDeviceToHost, a_), cudaSuccess);
  cudaHostRegister(host.data(), 4096, cudaHostRegisterDefault);
  cudaHostRegister(host.data() + 1, 1, cudaHostRegisterPortable);
  cudaHostUnregister(host.data());
  cudaHostUnregister(host.data());
  cuda_.free(device);
  const cudaEvent_t spins = make_event(cudaEventDisableTiming);
  cudaEventSynchronize(spins);
  cudaSetDevice(1);
  const cudaEvent_t elsewhere = make_event();
  EXPECT_EQ(cudaEventRecord(elsewhere, a_), cudaErrorInvalidResourceHandle);
  cudaEventDestroy(elsewhere);
  cudaEventDestroy(elsewhere);
  EXPECT_EQ(cuda_.finish(),
            "cudaMemcpyAsync with host memory that is not registered\n"
            "host memory was registered for one device of several\n"
            "host memory was registered twice\n"
            "host memory was unregistered while a queued copy touches it\n"
            "cudaHostUnregister of memory that is not registered\n"
            "device memory was freed while a queued copy touches it\n"
            "cudaEventSynchronize spins: the event was made without cudaEventBlockingSync\n"
            "an event of one device was recorded on a stream of another\n"
            "cudaEventDestroy of what was destroyed, or never made\n"
            "1 events were not destroyed\n"
            "an error was left for the program's next cudaGetLastError\n");
}

}  // namespace
}  // namespace pyckpt::test
