// Stands between the engine and the kernel, so that a test can see, delay or refuse a system call.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>

namespace pyckpt::test {

// What to do instead of a call; an empty function means the call itself. A function reports failure
// as the call does: -1 and errno. It may run on any thread, and on several at once.
struct Hooks {
  std::function<ssize_t(int, const void*, size_t, off_t)> pwrite;
  std::function<int(int)> fsync;
  std::function<int(int, off_t)> ftruncate;
  std::function<int(int, off_t)> fallocate;  // of that many bytes from the start
  std::function<int(int, int)> set_flags;    // fcntl(F_SETFL)
};

// Puts hooks in place while it lives. One at a time; make it before, and destroy it after, the
// threads that it is for do their work.
class HookedKernel {
 public:
  explicit HookedKernel(Hooks hooks);
  HookedKernel(const HookedKernel&) = delete;
  HookedKernel& operator=(const HookedKernel&) = delete;
  ~HookedKernel();

 private:
  const Hooks hooks_;
};

// The calls themselves, for hooks to pass on to.
ssize_t real_pwrite(int descriptor, const void* data, size_t size, off_t offset);
int real_fsync(int descriptor);
int real_ftruncate(int descriptor, off_t size);

// Fails as a system call does.
int refuse(int error_number);

// The path that a descriptor was opened with.
std::string path_of(int descriptor);

}  // namespace pyckpt::test
