#include "stream_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pyckpt {

#ifdef __SSE2__

void copy_past_cache(std::byte* to, const std::byte* from, size_t size) {
  constexpr size_t kLine = 64;
  // Below that the fence costs more than it saves.
  constexpr size_t kMin = 4096;
  if (size < kMin || reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) != 0) {
    std::memcpy(to, from, size);
    return;
  }
  const size_t lines = size / kLine;
  for (size_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from);
    auto* const destination = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
  }
  std::memcpy(to, from, size % kLine);
  _mm_sfence();  // streaming stores are not ordered by locks and atomics
}

#else

void copy_past_cache(std::byte* to, const std::byte* from, size_t size) {
  std::memcpy(to, from, size);
}

#endif

}  // namespace pyckpt
