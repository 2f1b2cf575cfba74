// What the targets share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace pyckpt::fuzz {

// Ends the process, which the fuzzer takes for a find.
#define REQUIRE(what)                                                                     \
  do {                                                                                    \
    if (!(what)) {                                                                        \
      std::fprintf(stderr, "%s:%d: this does not hold: %s\n", __FILE__, __LINE__, #what); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// Takes apart what the fuzzer gives. Where nothing is left, all numbers are 0.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  size_t left() const { return static_cast<size_t>(end_ - at_); }
  uint8_t byte() { return at_ == end_ ? 0 : *at_++; }
  uint64_t below(uint64_t end) { return byte() % end; }
  // Mostly small, now and then any.
  int64_t number() {
    const uint8_t first = byte();
    if (first < 0xf0) return first % 9;
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return static_cast<int64_t>(first & 1 ? value : value >> 1);
  }
  std::string_view rest() {
    const std::string_view all(reinterpret_cast<const char*>(at_), left());
    at_ = end_;
    return all;
  }
  // Up to the next part: two bytes that say its length, then its bytes.
  std::string_view part() {
    const size_t said = byte() | static_cast<size_t>(byte()) << 8;
    const size_t size = said < left() ? said : left();
    const std::string_view taken(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return taken;
  }

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
};

// On the heap and no longer than it is, so that a sanitizer sees a read beyond.
inline std::vector<std::byte> copied(std::string_view bytes) {
  const auto* const from = reinterpret_cast<const std::byte*>(bytes.data());
  return std::vector<std::byte>(from, from + bytes.size());
}

}  // namespace pyckpt::fuzz
