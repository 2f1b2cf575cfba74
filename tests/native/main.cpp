// Runs the native tests. One that hangs is named and ends the run.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>

#include "support.h"

namespace {

std::string running;  // set while no alarm is armed

class Watchdog : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    running = std::string("HANGS: ") + test.test_suite_name() + "." + test.name() + "\n";
    ::alarm(4 * pyckpt::test::hang_seconds());  // the last resort: a test may rescue itself
  }
  void OnTestEnd(const testing::TestInfo&) override { ::alarm(0); }
};

void on_alarm(int) {
  if (::write(STDERR_FILENO, running.data(), running.size()) < 0) ::_exit(3);
  ::abort();
}

}  // namespace

#ifdef __SANITIZE_THREAD__
// The owners of an exception are counted in libstdc++, which is not instrumented: the sanitizer
// does not see that the last one, who frees it, comes after those who read it.
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  ::signal(SIGALRM, on_alarm);
  testing::UnitTest::GetInstance()->listeners().Append(new Watchdog);
  return RUN_ALL_TESTS();
}
