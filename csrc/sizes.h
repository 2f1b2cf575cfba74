// Sizes, in bytes, that several places must agree on. Those that Python needs are attributes of
// pyckpt._C.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyckpt {

// What memory, file offsets and lengths are multiples of, so that they suit direct I/O on any disk.
// The kernel, too, manages memory in these.
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;

// The file. Large payloads begin on a page of it, whatever the disk asks for, so that an image is
// the same everywhere and can be read without a copy.
constexpr uint64_t kAlignedPayloadMin = 64 << 10;

// From this size on, a payload that need not be copied gets windows of its own. Smaller ones are
// worth more as part of a large write or read.
constexpr uint64_t kInPlaceMin = 1 << 20;

// Ranges of a file that are closer than this are read in one go: passing over what lies between
// costs less than another request to the disk.
constexpr uint64_t kMergeGap = 64 << 10;

// Staging. Smaller sources share regions and units, each aligned to a cache line.
constexpr uint64_t kSmallSource = 64 << 10;
constexpr uint64_t kSmallAlignment = 64;

// What a thread does at a time that gathers, or scatters, and checksums in turns: it stays in a
// core's cache between the two.
constexpr uint64_t kCacheBlock = 128 << 10;

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t round_down(uint64_t value, uint64_t multiple) {
  return value / multiple * multiple;
}

}  // namespace pyckpt
