// The one place that talks to the kernel about files.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pyckpt {

// When to bypass the page cache (O_DIRECT).
enum class Direct {
  kAuto,     // where the file system can; otherwise go on buffered
  kRequire,  // or fail
  kOff,      // never
};

// Owns the descriptor of one file. All calls throw IoError with path and offset; short transfers
// and EINTR are continued, and so is EAGAIN for a while. `write` and `read` may be called from any
// thread at the same time; everything else by the owner alone, while no transfer is under way.
class File {
 public:
  // Makes a new file; one that exists already is an error (EEXIST). Open for writing.
  static File create(const std::string& path, Direct direct);
  // Opens a file that exists, for reading.
  static File open(const std::string& path, Direct direct);

  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  File& operator=(File&&) = delete;
  ~File();  // closes, and ignores what close says: call `close` to hear it

  // Whether transfers bypass the page cache now. Turns false when the kernel refuses one under
  // kAuto.
  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  // Why they do not, for a log: empty while they do, or when nobody asked.
  std::string fallback_reason() const;

  // What memory addresses, and what file offsets and lengths, must be multiples of while `direct`.
  size_t memory_alignment() const { return memory_alignment_; }
  size_t offset_alignment() const { return offset_alignment_; }

  // Reserves `size` bytes of disk, so that a full disk is found out first and extents are few. File
  // systems that cannot are passed over silently: it is a help, not a promise.
  void preallocate(uint64_t size);
  void write(const void* data, size_t size, uint64_t offset);
  // Returns how many bytes there were: fewer than `size` only where the file ends.
  size_t read(void* data, size_t size, uint64_t offset);
  void truncate(uint64_t size);
  void sync();
  void close();

  const std::string& path() const { return path_; }

 private:
  File(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  void start_direct(Direct direct);
  void stop_direct(int error_number, const char* call);

  // Constant after construction.
  int descriptor_;
  std::string path_;
  bool require_direct_ = false;
  size_t memory_alignment_ = 1;
  size_t offset_alignment_ = 1;

  std::atomic<bool> direct_{false};
  std::atomic<int> fallback_errno_{0};
  std::atomic<const char*> fallback_call_{""};
};

// Makes the names in a directory durable: what was created, renamed or removed in it.
void sync_directory(const std::string& path);

// Removes a name; one that is gone already is no error. Returns false where it could not.
bool remove_file(const std::string& path) noexcept;

}  // namespace pyckpt
