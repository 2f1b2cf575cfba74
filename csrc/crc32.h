// CRC-32 as zip, gzip and PNG use it: polynomial 0x04C11DB7, bits reflected, inverted before and
// after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyckpt {

// The checksum of `data` appended to bytes whose checksum is `crc` (0 for none). Uses carry-less
// multiplication where the processor has it.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// Copies, and returns the checksum of what it copied, appended to bytes whose checksum is `crc`.
// Each byte is fetched once: this takes about as long as the copy alone. The two must not overlap.
uint32_t copy_crc32(uint32_t crc, void* to, const void* from, size_t size);

// The same to memory that nobody reads soon: the lines written are neither fetched before nor kept
// in the cache. The copy is ordered before whatever the thread does next.
uint32_t copy_crc32_past_cache(uint32_t crc, void* to, const void* from, size_t size);

// What `crc`, the checksum of some bytes A, contributes to the checksum of A followed by `size`
// more bytes B: crc32(A + B) == crc32_shift(crc32(A), size) ^ crc32(B). Being linear, the
// contributions of the pieces of a message can be XORed in any order, so that threads may finish
// them in any order.
uint32_t crc32_shift(uint32_t crc, uint64_t size);

// The functions above for one kind of processor.
struct Crc32Variant {
  const char* name;
  uint32_t (*crc32)(uint32_t crc, const void* data, size_t size);
  uint32_t (*copy)(uint32_t crc, void* to, const void* from, size_t size);
  uint32_t (*copy_past_cache)(uint32_t crc, void* to, const void* from, size_t size);
};

// The variants that this processor can run, the fastest first; the last one uses table look-ups
// alone and runs anywhere. Public so that tests hold each against the others, and benchmarks
// compare them.
const std::vector<Crc32Variant>& crc32_variants();

}  // namespace pyckpt
