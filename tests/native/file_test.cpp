// Files on a real disk: direct and buffered, what the kernel may refuse, and what errors say.
#include "file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "kernel.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

// The error that `f` must throw.
template <typename F>
IoError error_of(F f) {
  try {
    f();
  } catch (const IoError& error) {
    return error;
  }
  ADD_FAILURE() << "no IoError was thrown";
  return IoError(0, "", "");
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class FileTest : public testing::Test {
 protected:
  File create(Direct direct) { return File::create(path_, direct); }

  TempDirectory directory_;
  const std::string path_ = directory_.file("file");
  Random random_{1};
};

// The same, where the disk can do direct I/O.
class DirectFileTest : public FileTest {
 protected:
  void SetUp() override {
    const std::string probe = directory_.file("probe");
    if (!File::create(probe, Direct::kAuto).direct()) {
      GTEST_SKIP() << "the file system of " << directory_.path() << " has no direct I/O";
    }
  }
};

TEST_F(DirectFileTest, WritesDirectly) {
  const std::string bytes = random_bytes(random_, 64 << 10);
  const Memory memory(bytes, 0);
  std::atomic<int> flags{0};
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) {
    flags = ::fcntl(descriptor, F_GETFL);
    return real_pwrite(descriptor, data, size, offset);
  };
  for (const Direct direct : {Direct::kAuto, Direct::kRequire}) {
    remove_file(path_);
    File file = create(direct);
    EXPECT_TRUE(file.direct());
    EXPECT_EQ(file.fallback_reason(), "");
    EXPECT_GT(file.memory_alignment(), 1u);
    EXPECT_GE(file.offset_alignment(), 512u);
    EXPECT_EQ(file.offset_alignment() & (file.offset_alignment() - 1), 0u);
    {
      const HookedKernel hooked(hooks);
      file.write(memory.data, 16 << 10, 0);
      EXPECT_TRUE(flags.load() & O_DIRECT);
    }
    file.write(memory.data + (16 << 10), 48 << 10, 16 << 10);
    file.sync();
    file.close();
    EXPECT_EQ(difference(read_file(path_), bytes), "");
  }
}

TEST_F(FileTest, OffIsBuffered) {
  File file = create(Direct::kOff);
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(file.fallback_reason(), "");
  EXPECT_EQ(file.memory_alignment(), 1u);
  EXPECT_EQ(file.offset_alignment(), 1u);
}

// Any size at any place, one byte at the end of the memory that it has.
TEST_F(FileTest, SizesThatHurt) {
  for (const Direct direct : {Direct::kOff, Direct::kAuto}) {
    for (const size_t size : {0, 1, 511, 512, 513, 4095, 4096, 4097, 65521, 1 << 20}) {
      for (const size_t shift : {0, 1, 512}) {
        for (const uint64_t offset : {0, 1, 4096}) {
          remove_file(path_);
          File file = create(direct);
          const std::string bytes = random_bytes(random_, size);
          const Memory memory(bytes, shift);
          file.write(memory.data, size, offset);
          file.close();
          const std::string expected = size == 0 ? "" : std::string(offset, '\0') + bytes;
          ASSERT_EQ(difference(read_file(path_), expected), "")
              << size << " bytes at " << offset << ", shifted by " << shift;
        }
      }
    }
  }
}

TEST_F(FileTest, PiecesInAnyOrderFromManyThreads) {
  constexpr size_t kPieces = 64, kPiece = 8192;
  const std::string bytes = random_bytes(random_, kPieces * kPiece);
  const Memory memory(bytes, 0);
  File file = create(Direct::kAuto);
  parallelize(4, [&](size_t i) {
    for (size_t piece = kPieces - 1 - i; piece < kPieces; piece -= 4) {
      file.write(memory.data + piece * kPiece, kPiece, piece * kPiece);
    }
  });
  file.close();
  EXPECT_EQ(difference(read_file(path_), bytes), "");
}

TEST_F(DirectFileTest, UnalignedWriteFallsBackUnderAuto) {
  const std::string bytes = random_bytes(random_, 4096);
  const Memory aligned(bytes, 0), odd(bytes, 1);
  File file = create(Direct::kAuto);
  file.write(aligned.data, 4096, 0);
  ASSERT_TRUE(file.direct());
  file.write(odd.data, 4096, 4096);
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(file.fallback_reason(), "pwrite: Invalid argument");
  file.write(odd.data, 100, 8192);
  file.close();
  EXPECT_EQ(difference(read_file(path_), bytes + bytes + bytes.substr(0, 100)), "");
}

TEST_F(DirectFileTest, UnalignedWriteIsAnErrorUnderRequire) {
  const Memory odd(random_bytes(random_, 4096), 1);
  File file = create(Direct::kRequire);
  const IoError error = error_of([&] { file.write(odd.data, 4096, 8192); });
  EXPECT_EQ(error.error_number(), EINVAL);
  EXPECT_EQ(error.path(), path_);
  EXPECT_TRUE(contains(error.message(), "direct I/O was required")) << error.message();
  EXPECT_TRUE(file.direct());
}

TEST_F(DirectFileTest, ManyThreadsFallBackAtOnce) {
  constexpr size_t kThreads = 8, kPiece = 4096;
  const std::string bytes = random_bytes(random_, kThreads * kPiece);
  const Memory memory(bytes, 0);
  Hooks hooks;
  hooks.pwrite = [](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    if (::fcntl(descriptor, F_GETFL) & O_DIRECT) return refuse(EOPNOTSUPP);
    return real_pwrite(descriptor, data, size, offset);
  };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kAuto);
  parallelize(kThreads,
              [&](size_t i) { file.write(memory.data + i * kPiece, kPiece, i * kPiece); });
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(file.fallback_reason(), "pwrite: Operation not supported");
  file.close();
  EXPECT_EQ(difference(read_file(path_), bytes), "");
}

TEST_F(DirectFileTest, RefusedAtOpen) {
  for (const int number : {EINVAL, EOPNOTSUPP}) {
    Hooks hooks;
    hooks.set_flags = [&](int descriptor, int flags) {
      if (flags & O_DIRECT) return refuse(number);
      return ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);  // any call that does no harm
    };
    const HookedKernel hooked(hooks);
    remove_file(path_);
    {
      File file = create(Direct::kAuto);
      EXPECT_FALSE(file.direct());
      EXPECT_TRUE(contains(file.fallback_reason(), "fcntl: ")) << file.fallback_reason();
      EXPECT_EQ(file.memory_alignment(), 1u);
      const Memory odd("hello", 1);
      file.write(odd.data, 5, 0);
    }
    EXPECT_EQ(read_file(path_), "hello");
    remove_file(path_);
    EXPECT_EQ(error_of([&] { create(Direct::kRequire); }).error_number(), number);
    EXPECT_FALSE(exists(path_));  // what was made is gone
  }
}

TEST_F(DirectFileTest, AnotherErrorAtOpenIsNoFallback) {
  Hooks hooks;
  hooks.set_flags = [&](int, int) { return refuse(EBADF); };
  const HookedKernel hooked(hooks);
  EXPECT_EQ(error_of([&] { create(Direct::kAuto); }).error_number(), EBADF);
  EXPECT_FALSE(exists(path_));
}

TEST_F(FileTest, AnExistingFileIsAnErrorAndStays) {
  {
    File file = create(Direct::kOff);
    file.write("abc", 3, 0);
  }
  const IoError error = error_of([&] { create(Direct::kAuto); });
  EXPECT_EQ(error.error_number(), EEXIST);
  EXPECT_EQ(error.path(), path_);
  EXPECT_EQ(error.message(), "open failed: File exists");
  EXPECT_EQ(read_file(path_), "abc");
}

TEST_F(FileTest, MissingParent) {
  const std::string path = directory_.file("missing/file");
  const IoError error = error_of([&] { File::create(path, Direct::kAuto); });
  EXPECT_EQ(error.error_number(), ENOENT);
  EXPECT_EQ(error.path(), path);
}

TEST_F(FileTest, ParentIsAFile) {
  create(Direct::kOff);
  const IoError error = error_of([&] { File::create(path_ + "/x", Direct::kAuto); });
  EXPECT_EQ(error.error_number(), ENOTDIR);
}

TEST_F(FileTest, InterruptedAndShortWritesGoOn) {
  const std::string bytes = random_bytes(random_, 10000);
  int calls = 0;
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    if (++calls % 3 == 0) return refuse(EINTR);
    return real_pwrite(descriptor, data, std::min<size_t>(size, 777), offset);
  };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  file.write(bytes.data(), bytes.size(), 5);
  EXPECT_EQ(difference(read_file(path_), std::string(5, '\0') + bytes), "");
  EXPECT_GE(calls, 13);
}

TEST_F(FileTest, WritesAreTriedAgainForAWhile) {
  int calls = 0;
  int refusals = 3;
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    if (calls++ < refusals) return refuse(EAGAIN);
    return real_pwrite(descriptor, data, size, offset);
  };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  file.write("abc", 3, 0);
  EXPECT_EQ(read_file(path_), "abc");
  EXPECT_EQ(calls, 4);

  calls = 0;
  refusals = 1000;
  const IoError error = error_of([&] { file.write("abc", 3, 0); });
  EXPECT_EQ(error.error_number(), EAGAIN);
  EXPECT_LT(calls, 100);
}

// What a short direct write leaves must still begin on the disk's grid.
TEST_F(DirectFileTest, ShortDirectWritesStayOnTheGrid) {
  const std::string bytes = random_bytes(random_, 64 << 10);
  const Memory memory(bytes, 0);
  File file = create(Direct::kRequire);
  const size_t grid = file.offset_alignment();
  size_t off_grid = 0;
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    off_grid += offset % grid != 0;
    const ssize_t written = real_pwrite(descriptor, data, std::min<size_t>(size, 3 * grid), offset);
    return size > 3 * grid ? written - 100 : written;
  };
  const HookedKernel hooked(hooks);
  file.write(memory.data, bytes.size(), 0);
  EXPECT_EQ(off_grid, 0u);
  EXPECT_TRUE(file.direct());
  EXPECT_EQ(difference(read_file(path_), bytes), "");
}

// A disk that takes less than one block each time must not hold a thread for ever.
TEST_F(DirectFileTest, ShortDirectWritesOfLessThanABlockEnd) {
  const Memory memory(random_bytes(random_, 8192), 0);
  File file = create(Direct::kAuto);
  const auto less = static_cast<ssize_t>(file.offset_alignment() / 2);
  int calls = 0;
  Hooks hooks;
  hooks.pwrite = [&](int, const void*, size_t, off_t) -> ssize_t {
    return ++calls < 100000 ? less : refuse(EIO);
  };
  const HookedKernel hooked(hooks);
  try {
    file.write(memory.data, 8192, 0);
  } catch (const IoError&) {
  }
  EXPECT_LT(calls, 100000);
}

TEST_F(FileTest, ErrorsSayWhere) {
  const std::string bytes = random_bytes(random_, 10000);
  Hooks hooks;
  hooks.pwrite = [&](int descriptor, const void* data, size_t size, off_t offset) -> ssize_t {
    if (offset > 70000) return refuse(EIO);
    return real_pwrite(descriptor, data, std::min<size_t>(size, 6000), offset);
  };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  const IoError error = error_of([&] { file.write(bytes.data(), bytes.size(), 70000); });
  EXPECT_EQ(error.error_number(), EIO);
  EXPECT_EQ(error.path(), path_);
  EXPECT_EQ(error.message(), "pwrite failed: Input/output error (4000 bytes at offset 76000)");
}

TEST_F(FileTest, AWriteOfNothingIsAnError) {
  Hooks hooks;
  hooks.pwrite = [&](int, const void*, size_t, off_t) { return ssize_t{0}; };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  EXPECT_EQ(error_of([&] { file.write("abc", 3, 0); }).error_number(), EIO);
}

// EINVAL means "no direct I/O" to a direct write alone.
TEST_F(FileTest, ARefusedBufferedWriteIsAnError) {
  Hooks hooks;
  hooks.pwrite = [&](int, const void*, size_t, off_t) { return ssize_t{refuse(EINVAL)}; };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  EXPECT_EQ(error_of([&] { file.write("abc", 3, 0); }).error_number(), EINVAL);
}

TEST_F(FileTest, FullDisk) {
  const TinyDisk disk(64 << 10);
  if (!disk.mounted()) GTEST_SKIP() << disk.refusal();
  const std::string path = disk.file("file");
  File file = File::create(path, Direct::kAuto);
  const std::string bytes = random_bytes(random_, 128 << 10);
  const Memory memory(bytes, 0);
  file.write(memory.data, 32 << 10, 0);
  const IoError error = error_of([&] { file.write(memory.data, 96 << 10, 32 << 10); });
  EXPECT_EQ(error.error_number(), ENOSPC);
  EXPECT_EQ(error.path(), path);
  // Where it got to, not where it began.
  EXPECT_TRUE(contains(error.message(), "65536 bytes at offset 65536")) << error.message();
}

TEST_F(FileTest, FullDiskAtPreallocation) {
  const TinyDisk disk(64 << 10);
  if (!disk.mounted()) GTEST_SKIP() << disk.refusal();
  File file = File::create(disk.file("file"), Direct::kAuto);
  const IoError error = error_of([&] { file.preallocate(65 << 10); });
  EXPECT_EQ(error.error_number(), ENOSPC);
  EXPECT_TRUE(contains(error.message(), "fallocate")) << error.message();
  file.preallocate(60 << 10);
}

TEST_F(FileTest, PreallocateAndTruncate) {
  File file = create(Direct::kAuto);
  file.preallocate(0);
  EXPECT_EQ(read_file(path_).size(), 0u);
  file.preallocate(100000);
  EXPECT_EQ(difference(read_file(path_), std::string(100000, '\0')), "");
  file.truncate(777);
  EXPECT_EQ(read_file(path_).size(), 777u);
  file.truncate(1000);
  EXPECT_EQ(read_file(path_).size(), 1000u);
}

TEST_F(FileTest, PreallocationIsAHelpNotAPromise) {
  int answers[] = {EINTR, EOPNOTSUPP, ENOSYS, EFBIG};
  int calls = 0;
  Hooks hooks;
  hooks.fallocate = [&](int, off_t) { return refuse(answers[calls++]); };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  for (int call = 1; call <= 3; ++call) {
    file.preallocate(5000);
    EXPECT_EQ(calls, call);  // not repeated
  }
  EXPECT_EQ(error_of([&] { file.preallocate(5000); }).error_number(), EFBIG);
}

TEST_F(FileTest, SyncIsNotRepeated) {
  int calls = 0;
  Hooks hooks;
  hooks.fsync = [&](int) {
    ++calls;
    return refuse(EIO);
  };
  const HookedKernel hooked(hooks);
  File file = create(Direct::kOff);
  const IoError error = error_of([&] { file.sync(); });
  EXPECT_EQ(error.error_number(), EIO);
  EXPECT_EQ(error.message(), "fsync failed: Input/output error");
  EXPECT_EQ(calls, 1);
}

TEST_F(FileTest, ClosedFilesFail) {
  File file = create(Direct::kOff);
  file.close();
  file.close();  // once more is allowed
  EXPECT_EQ(error_of([&] { file.write("abc", 3, 0); }).error_number(), EBADF);
  EXPECT_EQ(error_of([&] { file.truncate(3); }).error_number(), EBADF);
  EXPECT_EQ(error_of([&] { file.sync(); }).error_number(), EBADF);
}

TEST_F(FileTest, AMoveTakesTheDescriptorAlong) {
  File file = create(Direct::kAuto);
  const bool direct = file.direct();
  const size_t alignment = file.offset_alignment();
  File other = std::move(file);
  EXPECT_EQ(other.direct(), direct);
  EXPECT_EQ(other.offset_alignment(), alignment);
  EXPECT_EQ(other.path(), path_);
  const Memory memory(std::string(4096, 'x'), 0);
  other.write(memory.data, 4096, 0);
  other.close();
  EXPECT_EQ(read_file(path_), std::string(4096, 'x'));
}

TEST_F(FileTest, NoDescriptorIsLost) {
  const auto open_descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_descriptors();
  for (int i = 0; i < 10; ++i) {
    remove_file(path_);
    File file = create(Direct::kAuto);
    File moved = std::move(file);
    EXPECT_THROW(create(Direct::kAuto), IoError);
    sync_directory(directory_.path());
    EXPECT_THROW(sync_directory(path_), IoError);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(FileTest, SyncDirectory) {
  EXPECT_NO_THROW(sync_directory(directory_.path()));
  const std::string missing = directory_.file("missing");
  const IoError error = error_of([&] { sync_directory(missing); });
  EXPECT_EQ(error.error_number(), ENOENT);
  EXPECT_EQ(error.path(), missing);
  create(Direct::kOff);
  EXPECT_EQ(error_of([&] { sync_directory(path_); }).error_number(), ENOTDIR);
}

TEST_F(FileTest, SyncDirectoryHearsErrors) {
  int answer = EIO;
  Hooks hooks;
  hooks.fsync = [&](int) { return refuse(answer); };
  const HookedKernel hooked(hooks);
  EXPECT_EQ(error_of([&] { sync_directory(directory_.path()); }).error_number(), EIO);
  answer = EINVAL;  // some network file systems, which cannot
  EXPECT_NO_THROW(sync_directory(directory_.path()));
}

TEST_F(FileTest, RemoveFile) {
  create(Direct::kOff);
  EXPECT_TRUE(remove_file(path_));
  EXPECT_FALSE(exists(path_));
  EXPECT_TRUE(remove_file(path_));               // gone already
  EXPECT_FALSE(remove_file(directory_.path()));  // a directory
}

}  // namespace
}  // namespace pyckpt
