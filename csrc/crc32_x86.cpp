#include "crc32_x86.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "crc32_polynomial.h"

// The code is compiled for each kind of processor, whatever the rest is compiled for, and chosen
// when the program runs.
#define TARGET_128 __attribute__((target("pclmul,sse4.1")))
#define TARGET_256 __attribute__((target("vpclmulqdq,avx2,pclmul,sse4.1")))
#define TARGET_512 __attribute__((target("vpclmulqdq,avx512f,pclmul,sse4.1")))

namespace pyckpt {
namespace {

// What becomes of the bytes besides.
enum class Store { kNone, kCached, kPastCache };

// Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel, 2009. A 128-bit accumulator that stands d bits before the
// next data is moved there by multiplying its halves with x^(d+64) and x^d modulo the polynomial.
// In the reflected order a product of two 64-bit values comes out one bit low, hence the exponents'
// -1 (and 32 from holding a 32-bit remainder in the upper half of a 64-bit constant).
constexpr int64_t fold_constant(uint64_t exponent) {
  return static_cast<int64_t>(static_cast<uint64_t>(crc32_power(exponent)) << 1);
}

// Moves an accumulator by so many bytes. Its low half holds the earlier bytes, so it moves 64 bits
// further than the high.
template <size_t bytes>
TARGET_128 inline __m128i fold_by() {
  constexpr int64_t kHigh = fold_constant(8 * bytes - 32), kLow = fold_constant(8 * bytes + 32);
  return _mm_set_epi64x(kHigh, kLow);
}

// 128 bits at a time.

TARGET_128 inline __m128i load_128(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

template <Store store>
TARGET_128 inline __m128i take_128(uint8_t* to, const uint8_t* from) {
  const __m128i data = load_128(from);
  if (store == Store::kCached) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), data);
  if (store == Store::kPastCache) _mm_stream_si128(reinterpret_cast<__m128i*>(to), data);
  return data;
}

TARGET_128 inline __m128i fold_128(__m128i accumulator, __m128i by, __m128i data) {
  const __m128i low = _mm_clmulepi64_si128(accumulator, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(accumulator, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

template <Store store>
uint32_t finish(uint32_t state, uint8_t* to, const uint8_t* from, size_t size) {
  if (store == Store::kNone) return crc32_update_portable(state, from, size);
  std::memcpy(to, from, size);
  // Of the copy, should somebody write to the source meanwhile.
  return crc32_update_portable(state, to, size);
}

// The update functions work on the inverted register, as the definition has it. Past the cache,
// `to` is aligned to 64 bytes.
template <Store store>
TARGET_128 uint32_t update_128(uint32_t state, uint8_t* to, const uint8_t* from, size_t size) {
  constexpr size_t kStride = 64;
  if (size < 16) return finish<store>(state, to, from, size);
  const __m128i by_stride = fold_by<kStride>(), by_16 = fold_by<16>();
  const uint8_t* const begin = from;
  const uint8_t* const end = from + size;
  const auto at = [&]() { return to + (from - begin); };
  __m128i a0 = _mm_xor_si128(take_128<store>(to, from), _mm_cvtsi32_si128(static_cast<int>(state)));
  from += 16;
  if (size >= kStride) {
    __m128i a1 = take_128<store>(at(), from);
    __m128i a2 = take_128<store>(at() + 16, from + 16);
    __m128i a3 = take_128<store>(at() + 32, from + 32);
    from += 48;
    for (; static_cast<size_t>(end - from) >= kStride; from += kStride) {
      a0 = fold_128(a0, by_stride, take_128<store>(at(), from));
      a1 = fold_128(a1, by_stride, take_128<store>(at() + 16, from + 16));
      a2 = fold_128(a2, by_stride, take_128<store>(at() + 32, from + 32));
      a3 = fold_128(a3, by_stride, take_128<store>(at() + 48, from + 48));
    }
    a0 = fold_128(a0, by_16, a1);
    a0 = fold_128(a0, by_16, a2);
    a0 = fold_128(a0, by_16, a3);
  }
  for (; end - from >= 16; from += 16) a0 = fold_128(a0, by_16, take_128<store>(at(), from));

  // What is left is a 16-byte message with the same checksum: small enough for the tables.
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), a0);
  state = crc32_update_portable(0, rest, sizeof(rest));
  return finish<store>(state, at(), from, static_cast<size_t>(end - from));
}

// 256 bits at a time: four accumulators of two blocks each.

template <Store store>
TARGET_256 inline __m256i take_256(uint8_t* to, const uint8_t* from) {
  const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (store == Store::kCached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), data);
  if (store == Store::kPastCache) _mm256_stream_si256(reinterpret_cast<__m256i*>(to), data);
  return data;
}

TARGET_256 inline __m256i fold_256(__m256i accumulator, __m256i by, __m256i data) {
  const __m256i low = _mm256_clmulepi64_epi128(accumulator, by, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(accumulator, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), data);
}

template <Store store>
TARGET_256 uint32_t update_256(uint32_t state, uint8_t* to, const uint8_t* from, size_t size) {
  constexpr size_t kStride = 128;
  if (size < kStride) return update_128<store>(state, to, from, size);
  const __m256i by_stride = _mm256_broadcastsi128_si256(fold_by<kStride>());
  const __m256i by_32 = _mm256_broadcastsi128_si256(fold_by<32>());
  const __m256i before = _mm256_set_epi64x(0, 0, 0, state);
  __m256i a0 = _mm256_xor_si256(take_256<store>(to, from), before);
  __m256i a1 = take_256<store>(to + 32, from + 32);
  __m256i a2 = take_256<store>(to + 64, from + 64);
  __m256i a3 = take_256<store>(to + 96, from + 96);
  size_t at = kStride;
  for (; size - at >= kStride; at += kStride) {
    a0 = fold_256(a0, by_stride, take_256<store>(to + at, from + at));
    a1 = fold_256(a1, by_stride, take_256<store>(to + at + 32, from + at + 32));
    a2 = fold_256(a2, by_stride, take_256<store>(to + at + 64, from + at + 64));
    a3 = fold_256(a3, by_stride, take_256<store>(to + at + 96, from + at + 96));
  }
  a0 = fold_256(a0, by_32, a1);
  a0 = fold_256(a0, by_32, a2);
  a0 = fold_256(a0, by_32, a3);
  alignas(32) uint8_t rest[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(rest), a0);
  state = update_128<Store::kNone>(0, rest, rest, sizeof(rest));
  return update_128<store>(state, to + at, from + at, size - at);
}

// 512 bits at a time: four accumulators of four blocks each.

template <Store store>
TARGET_512 inline __m512i take_512(uint8_t* to, const uint8_t* from) {
  const __m512i data = _mm512_loadu_si512(from);
  if (store == Store::kCached) _mm512_storeu_si512(to, data);
  if (store == Store::kPastCache) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), data);
  return data;
}

TARGET_512 inline __m512i fold_512(__m512i accumulator, __m512i by, __m512i data) {
  const __m512i low = _mm512_clmulepi64_epi128(accumulator, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(accumulator, by, 0x11);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(low, high, data, kXorOfThree);
}

// Not by a broadcast, of which GCC 12 warns that it uses what is not initialized.
template <size_t bytes>
TARGET_512 inline __m512i fold_by_512() {
  constexpr int64_t kHigh = fold_constant(8 * bytes - 32), kLow = fold_constant(8 * bytes + 32);
  return _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
}

template <Store store>
TARGET_512 uint32_t update_512(uint32_t state, uint8_t* to, const uint8_t* from, size_t size) {
  constexpr size_t kStride = 256;
  if (size < kStride) return update_128<store>(state, to, from, size);
  const __m512i by_stride = fold_by_512<kStride>(), by_64 = fold_by_512<64>();
  const __m512i before = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, state);
  __m512i a0 = _mm512_xor_si512(take_512<store>(to, from), before);
  __m512i a1 = take_512<store>(to + 64, from + 64);
  __m512i a2 = take_512<store>(to + 128, from + 128);
  __m512i a3 = take_512<store>(to + 192, from + 192);
  size_t at = kStride;
  for (; size - at >= kStride; at += kStride) {
    a0 = fold_512(a0, by_stride, take_512<store>(to + at, from + at));
    a1 = fold_512(a1, by_stride, take_512<store>(to + at + 64, from + at + 64));
    a2 = fold_512(a2, by_stride, take_512<store>(to + at + 128, from + at + 128));
    a3 = fold_512(a3, by_stride, take_512<store>(to + at + 192, from + at + 192));
  }
  a0 = fold_512(a0, by_64, a1);
  a0 = fold_512(a0, by_64, a2);
  a0 = fold_512(a0, by_64, a3);
  alignas(64) uint8_t rest[64];
  _mm512_store_si512(rest, a0);
  state = update_128<Store::kNone>(0, rest, rest, sizeof(rest));
  return update_128<store>(state, to + at, from + at, size - at);
}

using Update = uint32_t (*)(uint32_t, uint8_t*, const uint8_t*, size_t);

template <Update update>
uint32_t checksum(uint32_t crc, const void* data, size_t size) {
  auto* const bytes = static_cast<uint8_t*>(const_cast<void*>(data));  // nothing is stored there
  return ~update(~crc, bytes, bytes, size);
}

template <Update update>
uint32_t copy(uint32_t crc, void* to, const void* from, size_t size) {
  return ~update(~crc, static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), size);
}

template <Update update_cached, Update update_past_cache>
uint32_t copy_past(uint32_t crc, void* to, const void* from, size_t size) {
  constexpr size_t kLine = 64;
  // Below that the fence costs more than it saves.
  constexpr size_t kMin = 4096;
  if (size < kMin) return copy<update_cached>(crc, to, from, size);
  auto* const bytes = static_cast<uint8_t*>(to);
  const auto* const source = static_cast<const uint8_t*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  const uint32_t state = update_cached(~crc, bytes, source, head);
  crc = ~update_past_cache(state, bytes + head, source + head, size - head);
  _mm_sfence();  // streaming stores are not ordered by locks and atomics
  return crc;
}

}  // namespace

#define VARIANT(name, update)                                           \
  Crc32Variant {                                                        \
    name, checksum<update<Store::kNone>>, copy<update<Store::kCached>>, \
        copy_past<update<Store::kCached>, update<Store::kPastCache>>    \
  }

std::vector<Crc32Variant> crc32_x86_variants() {
  std::vector<Crc32Variant> variants;
  const bool has_128 = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  const bool has_wide = has_128 && __builtin_cpu_supports("vpclmulqdq");
  if (has_wide && __builtin_cpu_supports("avx512f")) {
    variants.push_back(VARIANT("avx512", update_512));
  }
  if (has_wide && __builtin_cpu_supports("avx2")) {
    variants.push_back(VARIANT("avx2", update_256));
  }
  if (has_128) variants.push_back(VARIANT("pclmul", update_128));
  return variants;
}

}  // namespace pyckpt

#else

namespace pyckpt {

std::vector<Crc32Variant> crc32_x86_variants() { return {}; }

}  // namespace pyckpt

#endif
