// Copies from the memory of a child, which a test may read wherever a test may run.
#include "peer_job.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "error.h"
#include "support.h"

namespace pyckpt::test {
namespace {

constexpr size_t kSize = (9 << 20) + 5;

// A child that has the parent's memory as it was when the child began, and waits to be killed.
class Peer {
 public:
  Peer() : process_(::fork()) {
    if (process_ != 0) return;
    for (;;) ::pause();
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() { end(); }

  pid_t process() const { return process_; }

  void end() {
    if (process_ < 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = -1;
  }

 private:
  pid_t process_;
};

uint64_t address_of(const std::string& data, size_t offset = 0) {
  return reinterpret_cast<uintptr_t>(data.data() + offset);
}

std::byte* bytes_of(std::string& data, size_t offset = 0) {
  return reinterpret_cast<std::byte*>(data.data() + offset);
}

class PeerJobTest : public ::testing::Test {
 protected:
  IoThreads threads_{3};
};

TEST_F(PeerJobTest, CopiesLargeAndSmallRangesOfSeveralProcesses) {
  Random random(1);
  const std::string original = random_bytes(random, kSize);
  std::string data = original;
  Peer first;
  // The second has other bytes at the same address.
  std::memset(data.data(), 7, data.size());
  Peer second;
  std::memset(data.data(), 0, data.size());

  std::string large(kSize, '\0'), other(kSize, '\0'), small(kSize, '\0');
  const auto job = std::make_shared<PeerJob>(&threads_);
  job->add(first.process(), address_of(data), bytes_of(large), kSize);
  std::string expected(kSize, '\0');
  for (size_t at = 3; at + 5000 < (4 << 20); at += 5000) {
    job->add(first.process(), address_of(data, at), bytes_of(small, at), 1000);
    expected.replace(at, 1000, original, at, 1000);
  }
  job->add(second.process(), address_of(data), bytes_of(other), kSize);
  job->add(second.process(), address_of(data), bytes_of(other), 0);
  job->run();
  EXPECT_EQ(difference(large, original), "");
  EXPECT_EQ(difference(small, expected), "");
  EXPECT_EQ(difference(other, std::string(kSize, 7)), "");
}

TEST_F(PeerJobTest, NothingToCopyIsNoError) { std::make_shared<PeerJob>(&threads_)->run(); }

int error_of(const std::shared_ptr<PeerJob>& job) {
  try {
    job->run();
  } catch (const IoError& error) {
    EXPECT_NE(error.message().find("process_vm_readv"), std::string::npos);
    return error.error_number();
  }
  return 0;
}

TEST_F(PeerJobTest, AProcessThatHasEndedIsAnError) {
  std::string data(kSize, 'a');
  Peer peer;
  const pid_t process = peer.process();
  peer.end();
  const auto job = std::make_shared<PeerJob>(&threads_);
  job->add(process, address_of(data), bytes_of(data), kSize);
  EXPECT_EQ(error_of(job), ESRCH);
}

// The kernel copies what comes before, and then says that there is no more.
TEST_F(PeerJobTest, MemoryThatIsNotThereIsAnError) {
  constexpr size_t kPages = 4 * 4096;
  void* const memory =
      ::mmap(nullptr, 2 * kPages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  std::memset(memory, 5, 2 * kPages);
  ::munmap(static_cast<char*>(memory) + kPages, kPages);
  Peer peer;
  std::string data(2 * kPages, '\0');
  const auto job = std::make_shared<PeerJob>(&threads_);
  job->add(peer.process(), reinterpret_cast<uintptr_t>(memory), bytes_of(data), 2 * kPages);
  EXPECT_EQ(error_of(job), EFAULT);
  EXPECT_EQ(difference(data.substr(0, kPages), std::string(kPages, 5)), "");
  ::munmap(memory, kPages);
}

TEST_F(PeerJobTest, AJobThatFailedBeforeItRanCopiesNothing) {
  std::string data(kSize, 'a');
  Peer peer;
  std::memset(data.data(), 'b', data.size());
  const auto job = std::make_shared<PeerJob>(&threads_);
  job->add(peer.process(), address_of(data), bytes_of(data), kSize);
  job->fail(std::make_exception_ptr(EngineClosed("closed")));
  EXPECT_THROW(job->run(), EngineClosed);
  EXPECT_EQ(difference(data, std::string(kSize, 'b')), "");
}

// As after the engine was closed by another thread: `run` must return.
TEST_F(PeerJobTest, WhereNoThreadsAreLeftAFailureEndsIt) {
  std::string data(kSize, 'a');
  threads_.stop();
  const auto job = std::make_shared<PeerJob>(&threads_);
  job->add(::getpid(), address_of(data), bytes_of(data), kSize);
  const auto failure = std::make_exception_ptr(EngineClosed("closed"));
  std::thread closer([&] { job->fail(failure); });
  EXPECT_THROW(job->run(), EngineClosed);
  closer.join();
}

}  // namespace
}  // namespace pyckpt::test
