#include "support.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace pyckpt::test {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream stream(path);
  std::string line;
  std::getline(stream, line);
  return line;
}

// "12 (name) S 1 ...": the letter. Empty once the thread is gone.
std::string state_of(pid_t thread) {
  const std::string line = first_line("/proc/self/task/" + std::to_string(thread) + "/stat");
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos ? "" : line.substr(name_end + 2, 1);
}

// Makes its copies when it is first waited for.
class LateTicket : public Ticket {
 public:
  LateTicket(std::vector<Transfer> transfers, std::function<void()> before_copy)
      : transfers_(std::move(transfers)), before_copy_(std::move(before_copy)) {}

  void wait() override {
    std::lock_guard lock(mutex_);
    if (copied_) return;
    if (before_copy_) before_copy_();
    for (const Transfer& transfer : transfers_) {
      std::memcpy(transfer.to, transfer.from, transfer.size);
    }
    copied_ = true;
  }

 private:
  const std::vector<Transfer> transfers_;
  const std::function<void()> before_copy_;
  std::mutex mutex_;
  bool copied_ = false;  // guarded by mutex_
};

}  // namespace

uint64_t draw(Random& random, uint64_t low, uint64_t high) {
  return low + random() % (high - low + 1);
}

std::string random_bytes(Random& random, size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, std::min<size_t>(8, size - i));
  }
  return bytes;
}

TempDirectory::TempDirectory() {
  const char* chosen = std::getenv("TEST_TMPDIR");
  path_ = std::string(chosen != nullptr ? chosen : TEST_DIRECTORY) + "/test-XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + path_);
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

TinyDisk::TinyDisk(size_t size) {
  // Mounts of an own namespace go with the process, even where it crashes.
  static const bool apart = ::unshare(CLONE_NEWNS) == 0 &&
                            ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  const std::string options = "size=" + std::to_string(size);
  if (!apart || ::mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, options.c_str()) != 0) {
    refusal_ = std::string("cannot mount a tmpfs: ") + std::strerror(errno);
  }
}

TinyDisk::~TinyDisk() {
  if (mounted()) ::umount2(directory_.path().c_str(), MNT_DETACH);
}

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + path);
  std::stringstream bytes;
  bytes << stream.rdbuf();
  return bytes.str();
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string difference(const std::string& actual, const std::string& expected) {
  if (actual == expected) return "";
  const size_t shorter = std::min(actual.size(), expected.size());
  size_t at = 0;
  while (at < shorter && actual[at] == expected[at]) ++at;
  return std::to_string(actual.size()) + " bytes, expected " + std::to_string(expected.size()) +
         "; first difference at " + std::to_string(at);
}

void Gate::open() {
  std::lock_guard lock(mutex_);
  open_ = true;
  opened_.notify_all();
}

void Gate::wait() {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [this] { return open_; });
}

void parallelize(size_t count, const std::function<void(size_t)>& f) {
  Gate start;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.wait();
      f(i);
    });
  }
  start.open();
  for (std::thread& thread : threads) thread.join();
}

unsigned hang_seconds() {
  static const char* const chosen = std::getenv("TEST_HANG_SECONDS");
  return chosen != nullptr ? static_cast<unsigned>(std::stoul(chosen)) : 30;
}

bool returns(const std::function<void()>& f, const std::function<void()>& rescue) {
  std::future<void> done = std::async(std::launch::async, f);
  const bool in_time =
      done.wait_for(std::chrono::seconds(hang_seconds())) == std::future_status::ready;
  if (!in_time) rescue();
  done.wait();
  if (in_time) done.get();
  return in_time;
}

void wait_until_asleep(pid_t thread) {
  for (int times = 0; times < 3; ++times) {
    while (state_of(thread) != "S") std::this_thread::yield();
  }
}

std::vector<pid_t> threads_named(const std::string& prefix) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    if (first_line(entry.path().string() + "/comm").rfind(prefix, 0) == 0) {
      found.push_back(std::stoi(entry.path().filename().string()));
    }
  }
  return found;
}

int in_child(const std::function<int()>& f) {
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    ::signal(SIGALRM, SIG_DFL);
    ::alarm(hang_seconds());
    int result = 125;
    try {
      result = f();
    } catch (...) {
    }
    ::_exit(result);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

uint32_t slow_crc32(const std::string& data) {
  uint32_t state = 0xFFFFFFFF;
  for (const char byte : data) {
    state ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (0xEDB88320 & (0u - (state & 1)));
  }
  return ~state;
}

Memory::Memory(const std::string& bytes, size_t shift) {
  constexpr size_t kPage = 4096;
  const size_t size = (bytes.size() + shift + kPage) / kPage * kPage;
  owner = std::shared_ptr<void>(std::aligned_alloc(kPage, size), std::free);
  data = static_cast<const std::byte*>(owner.get()) + shift;
  std::memcpy(static_cast<std::byte*>(owner.get()) + shift, bytes.data(), bytes.size());
}

namespace {
StoppingMemory* stopping = nullptr;
}

StoppingMemory::StoppingMemory(size_t steps) : steps_(steps) {
  ::sem_init(&read_, 0, 0);
  ::sem_init(&going_on_, 0, 0);
  void* const memory =
      ::mmap(nullptr, size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  stopping = this;
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, &before_);
}

StoppingMemory::~StoppingMemory() {
  ::sigaction(SIGSEGV, &before_, nullptr);
  stopping = nullptr;
  ::munmap(data_, size());
}

void StoppingMemory::wait_for_reader() {
  while (::sem_wait(&read_) != 0) {
  }
}

void StoppingMemory::let_go_on() { ::sem_post(&going_on_); }

// In the thread that reads.
void StoppingMemory::on_fault(int, siginfo_t* info, void*) {
  auto* const at = static_cast<std::byte*>(info->si_addr);
  if (stopping == nullptr || at < stopping->data_ || at >= stopping->data_ + stopping->size()) {
    ::signal(SIGSEGV, SIG_DFL);  // somebody else's, when it comes again
    return;
  }
  stopping->stops_.fetch_add(1);
  ::sem_post(&stopping->read_);
  while (::sem_wait(&stopping->going_on_) != 0) {
  }
  ::sem_post(&stopping->going_on_);  // for those who come later
  const size_t step = static_cast<size_t>(at - stopping->data_) / kStep;
  ::mprotect(stopping->data_ + step * kStep, kStep, PROT_READ);
}

FakeDevice::FakeDevice(std::function<void()> before_copy) : before_copy_(std::move(before_copy)) {}

std::shared_ptr<Ticket> FakeDevice::copy_to_host(const std::vector<Transfer>& transfers) {
  return std::make_shared<LateTicket>(transfers, before_copy_);
}

std::shared_ptr<Ticket> FakeDevice::copy_from_host(const std::vector<Transfer>& transfers) {
  return copy_to_host(transfers);
}

std::shared_ptr<Envelope> make_envelope(Random& random, size_t prefix, size_t suffix,
                                        size_t payload) {
  auto envelope = std::make_shared<Envelope>();
  envelope->prefix = random_bytes(random, prefix);
  envelope->suffix = random_bytes(random, suffix);
  envelope->payload_size = payload;
  if (suffix >= 4) envelope->crc_positions = {0, static_cast<uint32_t>(suffix - 4)};
  return envelope;
}

Sample make_sample(std::shared_ptr<const Envelope> envelope, const std::string& payload,
                   size_t shift) {
  Memory memory(payload, shift);
  Sample sample;
  sample.envelope = std::move(envelope);
  sample.source.data = memory.data;
  sample.source.size = payload.size();
  sample.payload = payload;
  sample.owner = std::move(memory.owner);
  return sample;
}

std::string reference_file(const std::vector<Sample>& samples, std::vector<Place>* places) {
  std::string file;
  for (const Sample& sample : samples) {
    const std::string prefix = sample.envelope ? sample.envelope->prefix : "";
    std::string suffix = sample.envelope ? sample.envelope->suffix : "";
    if (sample.payload.size() >= 65536) {
      while ((file.size() + prefix.size()) % 4096 != 0) file += '\0';
    }
    const uint32_t crc = slow_crc32(sample.payload);
    const uint64_t length = prefix.size() + sample.payload.size() + suffix.size();
    places->push_back({file.size(), length, prefix.size(), crc});
    if (sample.envelope) {
      for (const uint32_t position : sample.envelope->crc_positions) {
        for (int i = 0; i < 4; ++i) suffix[position + i] = static_cast<char>(crc >> (8 * i) & 0xFF);
      }
    }
    file += prefix + sample.payload + suffix;
  }
  return file;
}

}  // namespace pyckpt::test
