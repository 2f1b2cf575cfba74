#include "file.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "error.h"
#include "sizes.h"

namespace pyckpt {
namespace {

// What direct I/O wants where the kernel (before 6.1) cannot say: no block device asks for more.
constexpr size_t kAssumedAlignment = kPage;

// The kernel moves no more than this in one call, whatever is asked (MAX_RW_COUNT).
constexpr size_t kTransferMax = 0x7ffff000;

// How often a direct write may move less than a block before it is not tried any more.
constexpr int kStallsMax = 8;

// How often a call that says "try again" is repeated, after a pause that begins with a millisecond
// and doubles: a quarter of a second in all.
constexpr int kAgainMax = 8;

// Not every libc that we build against declares these; the values are kernel ABI (linux/stat.h).
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif
constexpr size_t kDioMemAlignAt = 0x98;
constexpr size_t kDioOffsetAlignAt = 0x9c;

struct DirectAlignment {
  size_t memory;
  size_t offset;
};

// What direct I/O on this file asks for; zeros where the file system says that it has none.
DirectAlignment direct_alignment(int descriptor) {
  // struct statx is read at its ABI offsets, since older headers end before these two fields.
  alignas(8) unsigned char buffer[256] = {};
  if (syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, buffer) != 0) {
    return {kAssumedAlignment, kAssumedAlignment};
  }
  uint32_t mask, memory, offset;
  std::copy_n(buffer, sizeof(mask), reinterpret_cast<unsigned char*>(&mask));
  std::copy_n(buffer + kDioMemAlignAt, sizeof(memory), reinterpret_cast<unsigned char*>(&memory));
  std::copy_n(buffer + kDioOffsetAlignAt, sizeof(offset),
              reinterpret_cast<unsigned char*>(&offset));
  if ((mask & STATX_DIOALIGN) == 0) return {kAssumedAlignment, kAssumedAlignment};
  return {memory, offset};
}

std::string at_offset(size_t size, uint64_t offset) {
  return std::to_string(size) + " bytes at offset " + std::to_string(offset);
}

// The answers of a file system that cannot do direct I/O, at open or at a transfer.
bool means_no_direct(int error_number) {
  return error_number == EINVAL || error_number == EOPNOTSUPP;
}

// Makes a call until it is neither interrupted nor told to try again, which network and user-space
// file systems do. The latter ends: errno is EAGAIN then.
template <typename Call>
auto persist(Call call) {
  for (int again = 0;;) {
    const auto result = call();
    if (result >= 0 || (errno != EINTR && errno != EAGAIN)) return result;
    if (errno == EAGAIN) {
      if (again == kAgainMax) return result;
      std::this_thread::sleep_for(std::chrono::milliseconds(1 << again++));
    }
  }
}

}  // namespace

File File::create(const std::string& path, Direct direct) {
  const int descriptor =
      persist([&] { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  if (descriptor < 0) throw IoError(errno, "open", path);
  File file(descriptor, path);
  try {
    file.start_direct(direct);
  } catch (...) {
    remove_file(path);
    throw;
  }
  return file;
}

File File::open(const std::string& path, Direct direct) {
  // Does not wait for whoever writes to a pipe; for a file the flag means nothing.
  const int descriptor =
      persist([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  if (descriptor < 0) throw IoError(errno, "open", path);
  File file(descriptor, path);
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) throw IoError(errno, "fstat", path);
  if (S_ISDIR(status.st_mode)) throw IoError(EISDIR, "open", path);
  if (!S_ISREG(status.st_mode)) throw IoError(EINVAL, "open", path, "not a regular file");
  file.start_direct(direct);
  return file;
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      require_direct_(other.require_direct_),
      memory_alignment_(other.memory_alignment_),
      offset_alignment_(other.offset_alignment_),
      direct_(other.direct_.load()),
      fallback_errno_(other.fallback_errno_.load()),
      fallback_call_(other.fallback_call_.load()) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

// O_DIRECT is set on the open descriptor rather than passed to open(2), which would leave the new
// file behind where the file system refuses the flag.
void File::start_direct(Direct direct) {
  if (direct == Direct::kOff) return;
  require_direct_ = direct == Direct::kRequire;
  const DirectAlignment alignment = direct_alignment(descriptor_);
  if (alignment.memory == 0 || alignment.offset == 0) {
    stop_direct(EOPNOTSUPP, "statx");
    return;
  }
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) throw IoError(errno, "fcntl", path_);
  if (::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) != 0) {
    if (!means_no_direct(errno)) throw IoError(errno, "fcntl", path_, "setting O_DIRECT");
    stop_direct(errno, "fcntl");
    return;
  }
  memory_alignment_ = alignment.memory;
  offset_alignment_ = alignment.offset;
  direct_.store(true, std::memory_order_relaxed);
}

// Several threads may get here at once, each refused the same way; they do the same, and the flag
// is cleared before any of them tries again.
void File::stop_direct(int error_number, const char* call) {
  if (require_direct_) throw IoError(error_number, call, path_, "direct I/O was required");
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) != 0) {
    throw IoError(errno, "fcntl", path_, "clearing O_DIRECT");
  }
  fallback_call_.store(call);
  fallback_errno_.store(error_number);
  direct_.store(false, std::memory_order_relaxed);
}

std::string File::fallback_reason() const {
  const int error_number = fallback_errno_.load();
  if (error_number == 0) return "";
  return std::string(fallback_call_.load()) + ": " + std::generic_category().message(error_number);
}

void File::preallocate(uint64_t size) {
  if (size == 0) return;
  // Not repeated after EINTR: some file systems begin anew, and an interval timer then goes on for
  // ever.
  if (::fallocate(descriptor_, 0, 0, static_cast<off_t>(size)) != 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS && errno != EINTR) {
    throw IoError(errno, "fallocate", path_, at_offset(size, 0));
  }
}

void File::write(const void* data, size_t size, uint64_t offset) {
  const char* from = static_cast<const char*>(data);
  int stalls = 0;
  while (size > 0) {
    const bool was_direct = direct();
    const ssize_t written = persist([&] {
      return ::pwrite(descriptor_, from, std::min(size, kTransferMax), static_cast<off_t>(offset));
    });
    if (written < 0) {
      if (was_direct && means_no_direct(errno)) {
        stop_direct(errno, "pwrite");
        continue;
      }
      throw IoError(errno, "pwrite", path_, at_offset(size, offset));
    }
    if (written == 0) throw IoError(EIO, "pwrite", path_, at_offset(size, offset) + ", wrote none");
    size_t advance = static_cast<size_t>(written);
    // A short direct write may end off the grid; its last, partial block is written again.
    if (was_direct && advance < size) advance -= advance % offset_alignment_;
    // Not even one block, again and again: the rest goes through the page cache.
    if (advance == 0 && ++stalls == kStallsMax) stop_direct(EIO, "pwrite");
    from += advance;
    offset += advance;
    size -= advance;
  }
}

size_t File::read(void* data, size_t size, uint64_t offset) {
  char* const to = static_cast<char*>(data);
  size_t done = 0;
  while (done < size) {
    const bool was_direct = direct();
    const size_t step = std::min(size - done, kTransferMax);
    const ssize_t got = persist(
        [&] { return ::pread(descriptor_, to + done, step, static_cast<off_t>(offset + done)); });
    if (got < 0) {
      if (was_direct && means_no_direct(errno)) {
        stop_direct(errno, "pread");
        continue;
      }
      throw IoError(errno, "pread", path_, at_offset(step, offset + done));
    }
    done += static_cast<size_t>(got);
    if (got == 0) break;
    // Direct reads end off the grid at the file's end alone; to go on from there would be refused.
    if (was_direct && done % offset_alignment_ != 0) break;
  }
  return done;
}

void File::truncate(uint64_t size) {
  if (persist([&] { return ::ftruncate(descriptor_, static_cast<off_t>(size)); }) != 0) {
    throw IoError(errno, "ftruncate", path_, "to " + std::to_string(size) + " bytes");
  }
}

// fsync is not repeated after EINTR or any other error: after a failure the kernel may have dropped
// the dirty pages and marked them clean, so that a second call would succeed without their bytes.
void File::sync() {
  if (::fsync(descriptor_) != 0) throw IoError(errno, "fsync", path_);
}

void File::close() {
  const int descriptor = std::exchange(descriptor_, -1);
  // The descriptor is gone whatever close returns (Linux), so it is never called again.
  if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR) {
    throw IoError(errno, "close", path_);
  }
}

void sync_directory(const std::string& path) {
  const int descriptor =
      persist([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (descriptor < 0) throw IoError(errno, "open", path);
  const int result = ::fsync(descriptor);
  const int error_number = errno;
  ::close(descriptor);
  // Some network file systems cannot sync a directory and say EINVAL; there is nothing more to do.
  if (result != 0 && error_number != EINVAL) throw IoError(error_number, "fsync", path);
}

bool remove_file(const std::string& path) noexcept {
  return ::unlink(path.c_str()) == 0 || errno == ENOENT;
}

}  // namespace pyckpt
