// CRC-32 as zip, gzip and PNG use it: polynomial 0x04C11DB7, bits reflected, inverted before and
// after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyckpt {

// The checksum of `data` appended to bytes whose checksum is `crc` (0 for none). Uses carry-less
// multiplication where the processor has it.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// The same with table look-ups alone; public so that tests can hold the two against each other.
uint32_t crc32_portable(uint32_t crc, const void* data, size_t size);

// What `crc`, the checksum of some bytes A, contributes to the checksum of A followed by `size`
// more bytes B: crc32(A + B) == crc32_shift(crc32(A), size) ^ crc32(B). Being linear, the
// contributions of the pieces of a message can be XORed in any order, so that threads may finish
// them in any order.
uint32_t crc32_shift(uint32_t crc, uint64_t size);

}  // namespace pyckpt
