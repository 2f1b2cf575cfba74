#include "pinned_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "error.h"
#include "numa.h"
#include "signals.h"
#include "sizes.h"

namespace pyckpt {
namespace {

// Returns 0, or the number of an error.
int populate_pages(std::byte* pages, size_t size) {
#ifdef MADV_POPULATE_WRITE
  int result;
  do {
    result = ::madvise(pages, size, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EAGAIN);
  if (result == 0) return 0;
  if (errno != EINVAL) return errno;
#endif
  // Kernels before 5.14 are asked page by page; in one step, since others may write there.
  for (size_t at = 0; at < size; at += kPage) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(pages + at), 0, __ATOMIC_RELAXED);
  }
  return 0;
}

IoError not_there(int error, size_t size) {
  return IoError(error, "madvise", "", std::to_string(size) + " bytes of memory");
}

}  // namespace

PinnedBuffer::PinnedBuffer(size_t size, bool shared) : size_(size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (shared) {
    flags = MAP_SHARED;
    descriptor_ = ::memfd_create("pyckpt", MFD_CLOEXEC);
    if (descriptor_ < 0) throw IoError(errno, "memfd_create", "", "shared memory");
    if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
      const int error = errno;
      ::close(descriptor_);
      throw IoError(error, "ftruncate", "", std::to_string(size) + " bytes of shared memory");
    }
  }
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, descriptor_, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw IoError(error, "mmap", "", std::to_string(size) + " bytes of memory");
  }
  data_ = static_cast<std::byte*>(memory);
  // A wish: fewer page faults, and fewer pages for the kernel to pin at each direct transfer. Where
  // it is not granted, nothing but speed is lost.
  ::madvise(memory, size, MADV_HUGEPAGE);
  // A fork while a transfer is under way would make the pages copy-on-write: the disk or the GPU
  // would go on with the old ones and the process with new ones. So a child does not get them at
  // all.
  ::madvise(memory, size, MADV_DONTFORK);
}

PinnedBuffer::~PinnedBuffer() {
  // A forked child has not got this memory. What lies there is the child's own.
  if (::getpid() != process_) {
    if (descriptor_ >= 0) ::close(descriptor_);
    return;
  }
#ifdef PYCKPT_CUDA
  for (size_t at = 0; at < registered_; at = piece_end(at)) {
    unregister_host_memory(device_, data_ + at);
  }
#endif
  ::munmap(data_, size_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void PinnedBuffer::pin([[maybe_unused]] int device) {
#ifdef PYCKPT_CUDA
  if (pinned_.load(std::memory_order_acquire)) return;
  const size_t registered = choose_device(device);
  // CUDA would have the pages made one after another, by one thread.
  populate(registered, size_ - registered);
  while (register_piece()) {
  }
#endif
}

bool PinnedBuffer::warm(size_t offset, size_t size, [[maybe_unused]] int device,
                        const std::function<bool()>& goes_on) {
#ifdef PYCKPT_CUDA
  if (device != kNoDevice) choose_device(device);  // which says where the pages are to be
#endif
  for (size_t done = 0; done < size;) {
    if (!goes_on()) return false;
    std::byte* const at = data_ + offset + done;
    // To the end of a huge page, or else two pieces would share one.
    const uintptr_t within = reinterpret_cast<uintptr_t>(at) % kHugePage;
    const size_t piece = std::min(kHugePage - within, size - done);
    const int failed = populate_pages(at, piece);
    if (failed != 0) throw not_there(failed, size - done);
    done += piece;
  }
#ifdef PYCKPT_CUDA
  if (device == kNoDevice) return true;
  do {
    if (!goes_on()) return false;
  } while (register_piece());
#endif
  return true;
}

#ifdef PYCKPT_CUDA
// The first decides near which device the pages are. Returns how many bytes are registered.
size_t PinnedBuffer::choose_device(int device) {
  const Lock lock(pinning_);
  if (device_ == kNoDevice) {
    device_ = device;
    uses_device_.store(true, std::memory_order_release);
    prefer_node(data_, size_, host_node(device));
  }
  return registered_;
}

// Registers the next piece; returns false where all are. Threads that do so at the same time take
// turns, so that none waits for more than a piece of another.
bool PinnedBuffer::register_piece() {
  const Lock lock(pinning_);
  if (registered_ == size_) return false;
  const size_t end = piece_end(registered_);
  register_host_memory(device_, data_ + registered_, end - registered_);
  registered_ = end;
  if (registered_ == size_) pinned_.store(true, std::memory_order_release);
  return true;
}
#endif

// Where the registration ends that begins at an offset; see kRegistrationPiece.
size_t PinnedBuffer::piece_end([[maybe_unused]] size_t offset) const {
#ifdef PYCKPT_CUDA
  const uintptr_t address = reinterpret_cast<uintptr_t>(data_) + offset;
  return std::min(size_, offset + kRegistrationPiece - address % kRegistrationPiece);
#else
  return size_;
#endif
}

void PinnedBuffer::populate(size_t offset, size_t size) {
  constexpr size_t kPiece = 16 << 20;
  // More fight for the kernel's locks.
  constexpr size_t kThreads = 8;
  const size_t pieces = (size + kPiece - 1) / kPiece;
  std::atomic<size_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) {
      const size_t at = i * kPiece;
      const int failed = populate_pages(data_ + offset + at, std::min(kPiece, size - at));
      if (failed == 0) continue;
      error.store(failed);
      next.store(pieces);
    }
  };
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  {
    const SignalsBlocked blocked;
    try {
      while (helpers.size() + 1 < std::min({pieces, kThreads, processors})) {
        helpers.emplace_back(work);
      }
    } catch (const std::exception&) {
      // Those that could be started will do, or this one alone.
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (error.load() != 0) throw not_there(error.load(), size);
}

}  // namespace pyckpt
