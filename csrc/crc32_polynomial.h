// The arithmetic behind CRC-32, which its variants share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pyckpt {

constexpr uint32_t kCrc32Polynomial = 0xEDB88320;  // 0x04C11DB7, bits reflected

// The product of two polynomials modulo the CRC's, in the reflected order (bit 31 is x^0).
constexpr uint32_t crc32_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kCrc32Polynomial : 0);
  }
  return product;
}

// Entry k is x^(2^k) modulo the CRC's polynomial.
constexpr std::array<uint32_t, 64> make_crc32_powers() {
  std::array<uint32_t, 64> powers{};
  powers[0] = 1u << 30;  // x
  for (size_t k = 1; k < powers.size(); ++k) {
    powers[k] = crc32_multiply(powers[k - 1], powers[k - 1]);
  }
  return powers;
}

inline constexpr std::array<uint32_t, 64> kCrc32Powers = make_crc32_powers();

// x^n modulo the CRC's polynomial.
constexpr uint32_t crc32_power(uint64_t n) {
  uint32_t result = 1u << 31;  // 1
  for (size_t k = 0; n != 0; ++k, n >>= 1) {
    if (n & 1) result = crc32_multiply(kCrc32Powers[k], result);
  }
  return result;
}

// Advances the inverted register, as the definition has it, by table look-ups.
uint32_t crc32_update_portable(uint32_t state, const uint8_t* data, size_t size);

}  // namespace pyckpt
