#include "crc32.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "crc32_polynomial.h"
#include "crc32_x86.h"

namespace pyckpt {
namespace {

// kTables[0] advances a checksum by one byte; kTables[k] by that byte and k zero bytes after it,
// which lets eight bytes be taken at once ("slicing by 8", Kounavis and Berry, Intel, 2005).
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kCrc32Polynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t crc32_portable(uint32_t crc, const void* data, size_t size) {
  return ~crc32_update_portable(~crc, static_cast<const uint8_t*>(data), size);
}

uint32_t copy_portable(uint32_t crc, void* to, const void* from, size_t size) {
  // Of a size that stays in the innermost cache between the copy and the checksum.
  constexpr size_t kBlock = 16 << 10;
  for (size_t done = 0; done < size;) {
    const size_t step = std::min(kBlock, size - done);
    std::byte* const block = static_cast<std::byte*>(to) + done;
    std::memcpy(block, static_cast<const std::byte*>(from) + done, step);
    crc = crc32_portable(crc, block, step);
    done += step;
  }
  return crc;
}

std::vector<Crc32Variant> find_variants() {
  std::vector<Crc32Variant> variants = crc32_x86_variants();
  variants.push_back({"portable", crc32_portable, copy_portable, copy_portable});
  return variants;
}

const Crc32Variant& fastest() {
  static const Crc32Variant variant = crc32_variants().front();
  return variant;
}

}  // namespace

uint32_t crc32_update_portable(uint32_t state, const uint8_t* data, size_t size) {
  while (size >= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    data += 8;
    size -= 8;
  }
  while (size-- > 0) state = (state >> 8) ^ kTables[0][(state ^ *data++) & 0xFF];
  return state;
}

const std::vector<Crc32Variant>& crc32_variants() {
  static const std::vector<Crc32Variant> variants = find_variants();
  return variants;
}

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  return fastest().crc32(crc, data, size);
}

uint32_t copy_crc32(uint32_t crc, void* to, const void* from, size_t size) {
  return fastest().copy(crc, to, from, size);
}

uint32_t copy_crc32_past_cache(uint32_t crc, void* to, const void* from, size_t size) {
  return fastest().copy_past_cache(crc, to, from, size);
}

uint32_t crc32_shift(uint32_t crc, uint64_t size) {
  // The exponent is 8 * size; x^(2^k) repeats with the order of x, but three doublings are simpler.
  uint32_t result = crc32_power(size);
  for (int doubling = 0; doubling < 3; ++doubling) result = crc32_multiply(result, result);
  return crc32_multiply(result, crc);
}

}  // namespace pyckpt
