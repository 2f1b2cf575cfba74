// The engine's threads: order, names, signals, and that stop runs what was submitted.
#include "io_threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

TEST(IoThreads, OneThreadKeepsTheOrder) {
  std::vector<int> ran;  // by one thread alone, read after it was joined
  IoThreads threads(1);
  for (int i = 0; i < 1000; ++i) threads.submit([&ran, i] { ran.push_back(i); });
  threads.stop();
  ASSERT_EQ(ran.size(), 1000u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(ran[i], i);
}

TEST(IoThreads, StopRunsAllThatWasSubmitted) {
  std::atomic<int> ran{0};
  Gate gate;
  IoThreads threads(2);
  for (int i = 0; i < 2; ++i) threads.submit([&] { gate.wait(); });
  for (int i = 0; i < 500; ++i) threads.submit([&] { ran.fetch_add(1); });
  EXPECT_EQ(ran.load(), 0);  // both threads are at the gate, or will be first
  gate.open();
  threads.stop();
  EXPECT_EQ(ran.load(), 500);
  threads.stop();  // once more is allowed
}

TEST(IoThreads, TheDestructorRunsAllToo) {
  std::atomic<int> ran{0};
  {
    IoThreads threads(3);
    for (int i = 0; i < 100; ++i) threads.submit([&] { ran.fetch_add(1); });
  }
  EXPECT_EQ(ran.load(), 100);
}

// As many tasks as there are threads run at the same time: each waits for all others.
TEST(IoThreads, AllThreadsWork) {
  constexpr int kThreads = 4;
  IoThreads threads(kThreads);
  EXPECT_EQ(threads.count(), 4u);
  std::atomic<int> arrived{0};
  Gate all;
  for (int i = 0; i < kThreads; ++i) {
    threads.submit([&] {
      if (arrived.fetch_add(1) + 1 == kThreads) all.open();
      all.wait();
    });
  }
  threads.stop();
  EXPECT_EQ(arrived.load(), kThreads);
}

TEST(IoThreads, ThreadsHaveNamesAndNoSignals) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  IoThreads threads(3);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int number = 1; number < SIGRTMIN; ++number) {
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
  }

  std::mutex mutex;
  std::set<std::string> names;
  std::atomic<int> arrived{0}, blocking{0};
  Gate all;
  for (int i = 0; i < 3; ++i) {
    threads.submit([&] {
      char name[16];
      pthread_getname_np(pthread_self(), name, sizeof(name));
      sigset_t mask;
      pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      if (sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1) ++blocking;
      {
        std::lock_guard lock(mutex);
        names.insert(name);
      }
      if (arrived.fetch_add(1) + 1 == 3) all.open();
      all.wait();
    });
  }
  threads.stop();
  EXPECT_EQ(names, (std::set<std::string>{"pyckpt-io-0", "pyckpt-io-1", "pyckpt-io-2"}));
  EXPECT_EQ(blocking.load(), 3);
}

TEST(IoThreads, SubmittedFromManyThreads) {
  std::vector<std::atomic<int>> ran(8 * 500);
  IoThreads threads(3);
  parallelize(8, [&](size_t i) {
    for (size_t k = 0; k < 500; ++k) threads.submit([&ran, i, k] { ++ran[i * 500 + k]; });
  });
  threads.stop();
  for (const std::atomic<int>& times : ran) ASSERT_EQ(times.load(), 1);
}

TEST(IoThreads, ATaskMaySubmit) {
  Gate ran;
  IoThreads threads(1);
  threads.submit([&] { EXPECT_TRUE(threads.submit([&] { ran.open(); })); });
  ran.wait();
}

// What a task holds may do anything as it goes, even submit.
TEST(IoThreads, ATaskIsDestroyedOutsideTheLock) {
  Gate ran;
  IoThreads threads(1);
  {
    std::shared_ptr<int> held(new int(0), [&](const int* number) {
      delete number;
      EXPECT_TRUE(threads.submit([&] { ran.open(); }));
    });
    threads.submit([held] {});
  }
  ran.wait();
}

}  // namespace
}  // namespace pyckpt
