#include "page_watch.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "error.h"

namespace pyckpt {
namespace {

// Each may cost two of the mappings of which a process has 65,530, since it splits one.
constexpr size_t kEntriesMax = 8192;

// From linux/userfaultfd.h and linux/fs.h of Linux 6.11, which is newer than many a system's
// headers.
constexpr int kUserModeOnly = 1;
constexpr uint64_t kFeatures = (1 << 0) |   // UFFD_FEATURE_PAGEFAULT_FLAG_WP
                               (1 << 13) |  // UFFD_FEATURE_WP_UNPOPULATED
                               (1 << 15);   // UFFD_FEATURE_WP_ASYNC

enum Category : uint64_t {
  kWatched = 1 << 0,  // PAGE_IS_WPALLOWED
  kWritten = 1 << 1,  // PAGE_IS_WRITTEN
  kFile = 1 << 2,     // PAGE_IS_FILE: of a file, or shared
  kPresent = 1 << 3,  // PAGE_IS_PRESENT
};

enum ScanFlag : uint64_t {
  kProtectMatching = 1 << 0,  // PM_SCAN_WP_MATCHING
  kMustBeWatched = 1 << 1,    // PM_SCAN_CHECK_WPASYNC
};

struct Region {
  uint64_t begin, end, categories;
};

struct Scan {
  uint64_t size = sizeof(Scan);
  uint64_t flags = 0;
  uint64_t begin = 0, end = 0;
  uint64_t walked_to = 0;
  uint64_t regions = 0, regions_size = 0;
  uint64_t pages_max = 0;
  uint64_t inverted = 0, all_of = 0, any_of = 0;
  uint64_t returned = 0;
};

struct Query {  // of the mapping at an address
  uint64_t size = sizeof(Query);
  uint64_t flags = 0;
  uint64_t address = 0;
  uint64_t begin = 0, end = 0;
  uint64_t mapping_flags = 0;
  uint64_t page_size = 0;
  uint64_t offset = 0;
  uint64_t inode = 0;
  uint32_t device_major = 0, device_minor = 0;
  uint32_t name_size = 0, build_id_size = 0;
  uint64_t name = 0, build_id = 0;
};

constexpr uint64_t kSharedMapping = 1 << 3;  // PROCMAP_QUERY_VMA_SHARED

const unsigned long kScan = _IOWR('f', 16, Scan);    // PAGEMAP_SCAN
const unsigned long kQuery = _IOWR('f', 17, Query);  // PROCMAP_QUERY

uintptr_t address_of(const std::byte* data) { return reinterpret_cast<uintptr_t>(data); }

// Before, memory that mremap moved kept marks of a watch that it had lost.
bool has_mended_mremap() {
  utsname system{};
  int major = 0, minor = 0;
  if (::uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &major, &minor) != 2) {
    return false;
  }
  return major > 6 || (major == 6 && minor >= 13);
}

int open_self(const std::string& name) {
  const std::string path = "/proc/self/" + name;
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw IoError(errno, "open", path);
  return descriptor;
}

}  // namespace

PageWatch::PageWatch()
    : process_(::getpid()), page_(static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE))) {
  const Lock lock(mutex_);
  if (!has_mended_mremap()) {
    throw IoError(ENOSYS, "userfaultfd", "", "before Linux 6.13 it loses track of moved memory");
  }
  // Faults of the kernel would need a privilege to be told. But these are not told to anybody.
  faults_ = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
  if (faults_ < 0) throw IoError(errno, "userfaultfd", "");
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = kFeatures;
  if (::ioctl(faults_, UFFDIO_API, &api) != 0) {
    const int error_number = errno;
    close_all();
    throw IoError(error_number, "UFFDIO_API", "", "asynchronous write protection");
  }
  try {
    pages_ = open_self("pagemap");
    Scan scan;  // of nothing: only whether there are scans
    if (::ioctl(pages_, kScan, &scan) < 0) throw IoError(errno, "PAGEMAP_SCAN", "");
    mappings_ = open_self("maps");
    Query query;
    query.address = address_of(reinterpret_cast<std::byte*>(this));
    if (::ioctl(mappings_, kQuery, &query) < 0) throw IoError(errno, "PROCMAP_QUERY", "");
  } catch (...) {
    close_all();
    throw;
  }
}

PageWatch::~PageWatch() { close(); }

void PageWatch::close() {
  if (is_forked()) return;
  const Lock lock(mutex_);
  // Closing does it, too, but a child that was forked may have the descriptor.
  for (const auto& [begin, entry] : entries_) {
    unregister(begin + entry.head.size(), begin + entry.size - entry.tail.size());
  }
  entries_.clear();
  close_all();
}

void PageWatch::close_all() {
  if (faults_ >= 0) ::close(faults_);
  if (pages_ >= 0) ::close(pages_);
  if (mappings_ >= 0) ::close(mappings_);
  faults_ = pages_ = mappings_ = -1;
}

// In a child another thread of the parent may have held the mutex at the fork, for good.
bool PageWatch::is_forked() const { return ::getpid() != process_; }

uint64_t PageWatch::watch(const std::byte* data, size_t size) {
  const uintptr_t first = address_of(data);
  const uintptr_t begin = (first + page_ - 1) / page_ * page_;
  const uintptr_t end = (first + size) / page_ * page_;
  if (begin >= end || is_forked()) return 0;
  const Lock lock(mutex_);
  if (faults_ < 0) return 0;
  // Below, pages are taken for unwritten from now on: not since an earlier call for other bytes.
  auto other = entries_.lower_bound(first);
  if (other != entries_.begin() &&
      std::prev(other)->first + std::prev(other)->second.size > first) {
    --other;
  }
  while (other != entries_.end() && other->first < first + size) other = entries_.erase(other);
  if (entries_.size() >= kEntriesMax || !protect(begin, end)) return 0;
  if (!is_ours_alone(begin, end) || !is_clean(begin, end)) {
    unregister(begin, end);
    return 0;
  }
  const std::byte* const inner = data + (begin - first);
  const std::byte* const behind = data + (end - first);
  const Entry entry{size, ++watches_, {data, inner}, {behind, data + size}};
  return entries_.emplace(first, entry).first->second.since;
}

bool PageWatch::is_unwritten(const std::byte* data, size_t size, uint64_t since) {
  if (is_forked()) return false;
  const Lock lock(mutex_);
  const uintptr_t first = address_of(data);
  const auto found = entries_.find(first);
  if (found == entries_.end()) return false;
  const Entry& entry = found->second;
  if (entry.size != size || entry.since != since) return false;
  const std::byte* const behind = data + size - entry.tail.size();
  const uintptr_t begin = first + entry.head.size();
  const uintptr_t end = address_of(behind);
  // Other memory may have come to this place, and somebody else may watch that: a scan does not say
  // for whom pages are watched. Registering says it, and changes nothing of what is ours.
  return register_pages(begin, end) && is_clean(begin, end) &&
         std::equal(entry.head.begin(), entry.head.end(), data) &&
         std::equal(entry.tail.begin(), entry.tail.end(), behind);
}

void PageWatch::forget(const std::byte* data, uint64_t since) {
  if (is_forked()) return;
  const Lock lock(mutex_);
  const uintptr_t first = address_of(data);
  const auto found = entries_.find(first);
  if (found == entries_.end() || found->second.since != since) return;
  const Entry& entry = found->second;
  unregister(first + entry.head.size(), first + entry.size - entry.tail.size());
  entries_.erase(found);
}

// Fails where another userfaultfd has any of them.
bool PageWatch::register_pages(uintptr_t begin, uintptr_t end) const {
  uffdio_register wanted{};
  wanted.range = {begin, end - begin};
  wanted.mode = UFFDIO_REGISTER_MODE_WP;
  return ::ioctl(faults_, UFFDIO_REGISTER, &wanted) == 0;
}

bool PageWatch::protect(uintptr_t begin, uintptr_t end) const {
  if (!register_pages(begin, end)) return false;
  Scan scan;
  scan.flags = kProtectMatching | kMustBeWatched;
  scan.begin = begin;
  scan.end = end;
  scan.all_of = kWritten;
  if (::ioctl(pages_, kScan, &scan) >= 0 && scan.walked_to == end) return true;
  unregister(begin, end);
  return false;
}

// Of files and devices, pages may change without a write that this process makes. What is mapped
// there later, instead, is not registered.
bool PageWatch::is_ours_alone(uintptr_t begin, uintptr_t end) const {
  while (begin < end) {
    Query query;
    query.address = begin;
    if (::ioctl(mappings_, kQuery, &query) < 0) return false;
    if (query.inode != 0 || (query.mapping_flags & kSharedMapping) != 0) return false;
    begin = query.end;
  }
  return true;
}

// Asks for the pages that are there, and were not written, and wants to hear of all: pages that the
// kernel says nothing of may be anything. One that was given back, for example, was not "written".
bool PageWatch::is_clean(uintptr_t begin, uintptr_t end) const {
  Region region{};
  Scan scan;
  scan.begin = begin;
  scan.end = end;
  scan.regions = reinterpret_cast<uint64_t>(&region);
  scan.regions_size = 1;
  scan.inverted = kWritten | kFile;
  scan.all_of = kWatched | kPresent | kWritten | kFile;
  scan.returned = kWatched;  // so that all of them are one region
  return ::ioctl(pages_, kScan, &scan) == 1 && region.begin == begin && region.end == end;
}

void PageWatch::unregister(uintptr_t begin, uintptr_t end) const {
  uffdio_range range{begin, end - begin};
  ::ioctl(faults_, UFFDIO_UNREGISTER, &range);  // fails where it is unmapped, and so forgotten
}

bool PageWatch::pinned() {
  std::ifstream status("/proc/self/status");
  const std::string name = "VmPin:";
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, name.size(), name) == 0) {
      return std::strtoull(line.c_str() + name.size(), nullptr, 10) != 0;
    }
  }
  return true;  // nobody knows
}

}  // namespace pyckpt
