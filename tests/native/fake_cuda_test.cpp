// The fake runtime itself: that it orders what CUDA orders and nothing else, and that it tells.
#include "fake_cuda.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <future>
#include <set>
#include <string>
#include <vector>

#include "pack.h"
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

TEST_F(FakeCudaTest, AFullQueueMakesTheThreadWait) {
  const cudaEvent_t event = make_event();
  cuda_.set_depth(3);
  cuda_.hold(a_);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaEventRecord(event, a_), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, b_), cudaSuccess);  // another queue has room
  auto record = std::async(std::launch::async, [&] { return cudaEventRecord(event, a_); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.step(a_);
  EXPECT_EQ(record.get(), cudaSuccess);
  cudaEventDestroy(event);
  EXPECT_EQ(cuda_.finish(), "");
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

// What a thread may not do while another captures, or itself does, by the modes of both.
TEST_F(FakeCudaTest, CapturesForbidWhatIsUnsafe) {
  const auto global = cudaStreamCaptureModeGlobal;
  const auto local = cudaStreamCaptureModeThreadLocal;
  const auto relaxed = cudaStreamCaptureModeRelaxed;
  struct Case {
    cudaStreamCaptureMode capture, thread;
    bool own, allowed;
  };
  const cudaEvent_t event = make_event();
  for (const Case& one : std::vector<Case>{{global, global, false, false},
                                           {global, global, true, false},
                                           {global, local, false, true},
                                           {global, local, true, false},
                                           {global, relaxed, false, true},
                                           {global, relaxed, true, true},
                                           {local, global, false, true},
                                           {local, global, true, false},
                                           {relaxed, global, false, true},
                                           {relaxed, global, true, true}}) {
    cuda_.begin_capture(a_, one.capture);
    const auto call = [&] {
      cudaStreamCaptureMode mode = one.thread;
      EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
      const cudaError_t error = cudaEventSynchronize(event);
      cudaThreadExchangeStreamCaptureMode(&mode);
      EXPECT_EQ(mode, one.thread);
      cudaGetLastError();
      return error;
    };
    const cudaError_t error = one.own ? call() : std::async(std::launch::async, call).get();
    EXPECT_EQ(error, one.allowed ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cuda_.end_capture(a_), one.allowed ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
  }
  cudaEventDestroy(event);
  EXPECT_EQ(cuda_.finish(), "");
}

TEST_F(FakeCudaTest, CapturesHaveTheirBorders) {
  const cudaEvent_t outside = make_event();
  const cudaEvent_t inside = make_event();
  cudaEventRecord(outside, b_);
  cuda_.begin_capture(a_);
  say(a_, "never");
  EXPECT_EQ(cudaStreamWaitEvent(a_, outside, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(cuda_.end_capture(a_), cudaErrorStreamCaptureInvalidated);
  cuda_.begin_capture(a_);
  cudaStreamCaptureStatus status;
  EXPECT_EQ(cudaStreamIsCapturing(a_, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaEventRecord(inside, a_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(a_, inside, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(b_, inside, 0), cudaSuccess);
  EXPECT_EQ(cuda_.end_capture(a_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(inside), cudaErrorCapturedEvent);
  EXPECT_EQ(said(), "");
  // The default stream, while a stream that waits for it captures.
  cudaStream_t blocking;
  ASSERT_EQ(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), cudaSuccess);
  cuda_.begin_capture(blocking);
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaEventRecord(outside, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cuda_.end_capture(blocking), cudaErrorStreamCaptureInvalidated);
  cudaStreamDestroy(blocking);
  cudaEventDestroy(inside);
  cudaEventDestroy(outside);
  cudaGetLastError();
  EXPECT_EQ(cuda_.finish(), "a stream joined the capture of a graph\n");
}

TEST_F(FakeCudaTest, KernelsAreLoadedWhenTheyAreNeeded) {
  cudaFuncAttributes attributes;
  EXPECT_EQ(cuda_.loaded(false), 0u);
  cuda_.begin_capture(a_);
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, small_pack_kernel()),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cuda_.end_capture(a_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, small_pack_kernel()), cudaSuccess);
  EXPECT_EQ(cuda_.loaded(false), 1u);
  EXPECT_EQ(cuda_.loaded(true), 0u);
  cuda_.begin_capture(a_);
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, small_pack_kernel()), cudaSuccess);
  EXPECT_EQ(cuda_.end_capture(a_), cudaSuccess);
  cudaGetLastError();
}

TEST_F(FakeCudaTest, RegistersNoMoreThanItMay) {
  std::vector<std::byte> host(3 * 4096);
  cuda_.set_registration_limit(2 * 4096);
  EXPECT_EQ(cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable),
            cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaHostRegister(host.data(), 2 * 4096, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cuda_.finish(), "");
}

// What CUDA would crash at, or not say.
// The thread sanitizer's own memory may come to lie where the test's was.
#ifndef __SANITIZE_THREAD__
TEST_F(FakeCudaTest, TellsOfMemoryThatIsGone) {
  constexpr size_t kSize = 1 << 16;
  // Far from where the kernel puts mappings that ask for no address, so that once it is gone no
  // thread or allocator gets this very place.
  void* const far = reinterpret_cast<void*>(uintptr_t{1} << 45);
  void* const copied =
      ::mmap(far, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  cudaHostRegister(copied, kSize, cudaHostRegisterPortable);
  cuda_.hold(a_);
  cudaMemcpyAsync(copied, cuda_.allocate(0, kSize), kSize, cudaMemcpyDeviceToHost, a_);
  ::munmap(copied, kSize);
  cuda_.release(a_);
  cuda_.settle();
  cudaHostUnregister(copied);
  EXPECT_EQ(cudaHostRegister(copied, kSize, cudaHostRegisterPortable), cudaErrorInvalidValue);
  cudaGetLastError();
  EXPECT_EQ(cuda_.finish(),
            "memory was unmapped while a queued copy touches it\n"
            "memory was unmapped while it was registered\n"
            "memory was registered that is not there\n");
}
#endif

TEST_F(FakeCudaTest, TellsOfAStreamThatGoesWhileItIsWaitedFor) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cuda_.hold(stream);
  say(stream, "1");
  auto waiter = std::async(std::launch::async, [&] { return cudaStreamSynchronize(stream); });
  EXPECT_TRUE(cuda_.blocked(1));
  cudaStreamDestroy(stream);
  cuda_.release(stream);
  EXPECT_EQ(waiter.get(), cudaSuccess);
  EXPECT_EQ(cuda_.finish(), "a stream was destroyed while a thread waits for it\n");
}

// Any call makes a context on the thread's device, whatever device it is about.
TEST_F(FakeCudaTest, ThreadsBeginWithDeviceZero) {
  cudaSetDevice(1);
  const cudaEvent_t event = make_event();
  EXPECT_EQ(cuda_.contexts(), (std::set<int>{1}));
  std::async(std::launch::async, [&] { cudaEventDestroy(event); }).get();
  EXPECT_EQ(cuda_.contexts(), (std::set<int>{0, 1}));
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
