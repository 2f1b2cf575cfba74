// What the native tests share.
#pragma once

#include <semaphore.h>
#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "envelope.h"
#include "image.h"

namespace pyckpt::test {

using Random = std::mt19937_64;

// A number from `low` to `high`, both included; the same on every platform.
uint64_t draw(Random& random, uint64_t low, uint64_t high);
std::string random_bytes(Random& random, size_t size);

// An empty directory on the disk that TEST_TMPDIR names, or the build's; removed at the end.
class TempDirectory {
 public:
  TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory();

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A tmpfs of so many bytes, seen by this process alone. Needs the right to mount.
class TinyDisk {
 public:
  explicit TinyDisk(size_t size);
  TinyDisk(const TinyDisk&) = delete;
  TinyDisk& operator=(const TinyDisk&) = delete;
  ~TinyDisk();

  bool mounted() const { return refusal_.empty(); }
  const std::string& refusal() const { return refusal_; }
  std::string file(const std::string& name) const { return directory_.file(name); }

 private:
  TempDirectory directory_;
  std::string refusal_;
};

std::string read_file(const std::string& path);
bool exists(const std::string& path);

// Empty where the two are equal, else where they part: a failure's text, unlike EXPECT_EQ's, of
// one line.
std::string difference(const std::string& actual, const std::string& expected);

// Opens once, for everyone.
class Gate {
 public:
  void open();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

// Runs f(0), ..., f(count - 1) on a thread each, all let go at once, and joins them.
void parallelize(size_t count, const std::function<void(size_t)>& f);

// What counts as a deadlock: much longer than anything here takes on a loaded machine under a
// sanitizer. TEST_HANG_SECONDS makes it less, for mutants that are meant to hang.
unsigned hang_seconds();

// Whether `f` returns. Only a deadlock makes this false. `rescue` is then called to end what hangs,
// so that the other tests go on.
bool returns(const std::function<void()>& f, const std::function<void()>& rescue);

// Waits until a thread of this process sleeps in the kernel; it has then most likely come to
// where it can only be woken. What hangs on this must not be that a test passes, only that it
// would catch what it is for.
void wait_until_asleep(pid_t thread);
std::vector<pid_t> threads_named(const std::string& prefix);

// Runs `f` in a forked child; its result is the child's exit status, a hang or a crash is -1.
int in_child(const std::function<int()>& f);

// CRC-32 bit by bit, straight from the definition.
uint32_t slow_crc32(const std::string& data);

// Memory on a page boundary, or `shift` bytes behind one.
struct Memory {
  Memory(const std::string& bytes, size_t shift);
  const std::byte* data;
  std::shared_ptr<void> owner;
};

// Memory that stops whoever reads it, at the first of each kStep bytes, until the reader is let go
// on. One at a time.
class StoppingMemory {
 public:
  static constexpr size_t kStep = 1 << 20;  // what a staging thread copies at a time

  explicit StoppingMemory(size_t steps);
  StoppingMemory(const StoppingMemory&) = delete;
  StoppingMemory& operator=(const StoppingMemory&) = delete;
  ~StoppingMemory();  // nobody may read it by then

  const std::byte* data() const { return data_; }
  size_t size() const { return steps_ * kStep; }

  void wait_for_reader();
  void let_go_on();
  // At how many steps somebody was stopped so far.
  int stops() const { return stops_.load(); }

 private:
  static void on_fault(int signal, siginfo_t* info, void* context);

  const size_t steps_;
  std::byte* data_;
  struct sigaction before_;
  sem_t read_, going_on_;
  std::atomic<int> stops_{0};
};

// A device whose memory is the host's. It copies when its ticket is waited for, and not before;
// first it calls `before_copy`, which may wait or throw.
class FakeDevice : public Device {
 public:
  explicit FakeDevice(std::function<void()> before_copy = nullptr);
  int index() const override { return 0; }
  bool is_ready() const override { return true; }
  void prepare() override {}
  std::shared_ptr<Ticket> copy_to_host(const std::vector<Transfer>& transfers) override;
  std::shared_ptr<Ticket> copy_from_host(const std::vector<Transfer>& transfers) override;
  void follow(Stream) override {}
  void hold(Stream, const Ticket&) override {}
  Stream to_host() override { return nullptr; }

 private:
  const std::function<void()> before_copy_;
};

// Random bytes of these sizes; the payload's CRC goes into the suffix where there is room.
std::shared_ptr<Envelope> make_envelope(Random& random, size_t prefix, size_t suffix,
                                        size_t payload);

// An item, and by itself what its bytes in the file must be.
struct Sample {
  std::shared_ptr<const Envelope> envelope;
  Source source;
  std::string payload;
  std::shared_ptr<void> owner;
};

// An item of contiguous host memory.
Sample make_sample(std::shared_ptr<const Envelope> envelope, const std::string& payload,
                   size_t shift = 0);

struct Place {
  uint64_t offset;
  uint64_t length;
  uint64_t payload_offset;
  uint32_t crc;
};

// The file that holds these items, by the rules of the format and nothing else.
std::string reference_file(const std::vector<Sample>& samples, std::vector<Place>* places);

}  // namespace pyckpt::test
