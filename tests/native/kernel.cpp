// The calls of the C library that csrc/file.cpp makes, with a door for hooks. A definition in the
// program goes before that of a shared library, also before a sanitizer's, which is called in turn.
#include "kernel.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <stdexcept>
#include <utility>

namespace pyckpt::test {
namespace {

std::atomic<const Hooks*> installed{nullptr};

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

HookedKernel::HookedKernel(Hooks hooks) : hooks_(std::move(hooks)) {
  if (installed.exchange(&hooks_) != nullptr) throw std::logic_error("hooks are in place already");
}

HookedKernel::~HookedKernel() { installed.store(nullptr); }

ssize_t real_pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  static auto* const call = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return call(descriptor, data, size, offset);
}

int real_fsync(int descriptor) {
  static auto* const call = next<int(int)>("fsync");
  return call(descriptor);
}

int real_ftruncate(int descriptor, off_t size) {
  static auto* const call = next<int(int, off_t)>("ftruncate");
  return call(descriptor, size);
}

int refuse(int error_number) {
  errno = error_number;
  return -1;
}

std::string path_of(int descriptor) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t size = ::readlink(link.c_str(), path, sizeof(path));
  return size < 0 ? "" : std::string(path, static_cast<size_t>(size));
}

}  // namespace pyckpt::test

using pyckpt::test::installed;

extern "C" {

ssize_t pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  const auto* hooks = installed.load();
  if (hooks && hooks->pwrite) return hooks->pwrite(descriptor, data, size, offset);
  return pyckpt::test::real_pwrite(descriptor, data, size, offset);
}

int fsync(int descriptor) {
  const auto* hooks = installed.load();
  if (hooks && hooks->fsync) return hooks->fsync(descriptor);
  return pyckpt::test::real_fsync(descriptor);
}

int ftruncate(int descriptor, off_t size) noexcept {
  const auto* hooks = installed.load();
  if (hooks && hooks->ftruncate) return hooks->ftruncate(descriptor, size);
  return pyckpt::test::real_ftruncate(descriptor, size);
}

int fallocate(int descriptor, int mode, off_t offset, off_t size) {
  const auto* hooks = installed.load();
  if (hooks && hooks->fallocate) return hooks->fallocate(descriptor, size);
  static auto* const call = pyckpt::test::next<int(int, int, off_t, off_t)>("fallocate");
  return call(descriptor, mode, offset, size);
}

int fcntl(int descriptor, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  const auto* hooks = installed.load();
  if (command == F_SETFL && hooks && hooks->set_flags) {
    return hooks->set_flags(descriptor, static_cast<int>(reinterpret_cast<intptr_t>(argument)));
  }
  static auto* const call = pyckpt::test::next<int(int, int, ...)>("fcntl");
  return call(descriptor, command, argument);
}

}  // extern "C"
