// Letting go of the GIL.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace pyckpt {

// Lets other threads have the GIL while it lives.
//
// Once the interpreter is being finalized, a daemon thread cannot have the GIL back. Before 3.14,
// Python then ends the thread by unwinding its stack, which terminates the process where a
// destructor asked for the GIL, and runs destructors without the GIL where none did. Here such a
// thread waits for the end of the process instead, as it does in 3.14.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) ::pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace pyckpt
