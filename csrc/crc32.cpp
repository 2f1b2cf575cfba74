#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyckpt {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // 0x04C11DB7, bits reflected

// kTables[0] advances a checksum by one byte; kTables[k] by that byte and k zero bytes after it,
// which lets eight bytes be taken at once ("slicing by 8", Kounavis and Berry, Intel, 2005).
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
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

// Both update functions work on the inverted register, as the definition has it; the public
// functions do the inverting.
uint32_t update_portable(uint32_t state, const uint8_t* data, size_t size) {
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

// The product of two polynomials modulo the CRC's, in the reflected order (bit 31 is x^0).
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// kPowers[k] is x^(2^k) modulo the CRC's polynomial.
constexpr std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  powers[0] = 1u << 30;  // x
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}

constexpr std::array<uint32_t, 64> kPowers = make_powers();

// x^n modulo the CRC's polynomial.
constexpr uint32_t power(uint64_t n) {
  uint32_t result = 1u << 31;  // 1
  for (size_t k = 0; n != 0; ++k, n >>= 1) {
    if (n & 1) result = multiply(kPowers[k], result);
  }
  return result;
}

#if defined(__x86_64__)

// Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel, 2009. A 128-bit accumulator that stands d bits before the
// next data is moved there by multiplying its halves with x^(d+64) and x^d modulo the polynomial.
// In the reflected order a product of two 64-bit values comes out one bit low, hence the exponents'
// -1 (and 32 from holding a 32-bit remainder in the upper half of a 64-bit constant).
constexpr uint64_t fold_constant(uint64_t exponent) {
  return static_cast<uint64_t>(power(exponent)) << 1;
}

constexpr size_t kAccumulators = 4;
constexpr size_t kStride = 16 * kAccumulators;

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i accumulator, __m128i constants,
                                                             __m128i data) {
  const __m128i low = _mm_clmulepi64_si128(accumulator, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(accumulator, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t update_clmul(uint32_t state, const uint8_t* data,
                                                               size_t size) {
  if (size < kStride) return update_portable(state, data, size);
  const auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  // The low half of an accumulator holds the earlier bytes, so it moves 64 bits further than the
  // high.
  const __m128i by_stride = _mm_set_epi64x(static_cast<int64_t>(fold_constant(8 * kStride - 32)),
                                           static_cast<int64_t>(fold_constant(8 * kStride + 32)));
  const __m128i by_16 = _mm_set_epi64x(static_cast<int64_t>(fold_constant(128 - 32)),
                                       static_cast<int64_t>(fold_constant(128 + 32)));

  __m128i a0 = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i a1 = load(data + 16);
  __m128i a2 = load(data + 32);
  __m128i a3 = load(data + 48);
  for (data += kStride, size -= kStride; size >= kStride; data += kStride, size -= kStride) {
    a0 = fold(a0, by_stride, load(data));
    a1 = fold(a1, by_stride, load(data + 16));
    a2 = fold(a2, by_stride, load(data + 32));
    a3 = fold(a3, by_stride, load(data + 48));
  }
  a0 = fold(a0, by_16, a1);
  a0 = fold(a0, by_16, a2);
  a0 = fold(a0, by_16, a3);
  for (; size >= 16; data += 16, size -= 16) a0 = fold(a0, by_16, load(data));

  // What is left is a 16-byte message with the same checksum: small enough for the tables.
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), a0);
  return update_portable(update_portable(0, rest, sizeof(rest)), data, size);
}

#endif

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Update choose_update() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) return update_clmul;
#endif
  return update_portable;
}

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  static const Update update = choose_update();
  return ~update(~crc, static_cast<const uint8_t*>(data), size);
}

uint32_t crc32_portable(uint32_t crc, const void* data, size_t size) {
  return ~update_portable(~crc, static_cast<const uint8_t*>(data), size);
}

uint32_t crc32_shift(uint32_t crc, uint64_t size) {
  // The exponent is 8 * size; x^(2^k) repeats with the order of x, but three doublings are simpler.
  uint32_t result = power(size);
  for (int doubling = 0; doubling < 3; ++doubling) result = multiply(result, result);
  return multiply(result, crc);
}

}  // namespace pyckpt
