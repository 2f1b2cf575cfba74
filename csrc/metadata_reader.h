// Bytes of a pickle that nobody vouches for, opcode by opcode.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "metadata_form.h"

namespace pyckpt {

// The bytes are not what they should be.
class NotCanonical : public std::exception {};

class MetadataReader {
 public:
  MetadataReader(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

  const uint8_t* at() const { return at_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }

  static void require(bool is_so) {
    if (!is_so) throw NotCanonical();
  }

  const uint8_t* take(uint64_t size) {
    require(size <= left());
    const uint8_t* const from = at_;
    at_ += size;
    return from;
  }

  // The next opcode, without taking it.
  uint8_t peek() const {
    require(left() != 0);
    return *at_;
  }

  uint8_t byte() { return *take(1); }
  void expect(uint8_t opcode) { require(byte() == opcode); }
  void expect(const std::string& opcodes) { require(accept(opcodes.data(), opcodes.size())); }

  template <size_t kCount>
  void expect(const std::array<uint8_t, kCount>& opcodes) {
    require(accept(opcodes));
  }

  template <size_t kCount>
  bool accept(const std::array<uint8_t, kCount>& opcodes) {
    return accept(opcodes.data(), kCount);
  }

  bool accept(const void* opcodes, size_t size) {
    if (left() < size || std::memcmp(at_, opcodes, size) != 0) return false;
    at_ += size;
    return true;
  }

  bool boolean() {
    const uint8_t opcode = byte();
    require(opcode == op::kTrue || opcode == op::kFalse);
    return opcode == op::kTrue;
  }

  uint32_t get() { return numbered(op::kGet1, op::kGet4); }
  uint32_t put() { return numbered(op::kPut1, op::kPut4); }

  // A whole number that fits in int64_t and is not less than 0, in as few bytes as it can be
  // written with.
  uint64_t number() {
    switch (byte()) {
      case op::kInt1:
        return byte();
      case op::kInt2: {
        const uint64_t value = little_endian(2);
        require(value > UINT8_MAX);
        return value;
      }
      case op::kInt4: {
        const uint64_t value = little_endian(4);
        require(value > UINT16_MAX && value <= INT32_MAX);
        return value;
      }
      case op::kLong1: {
        const size_t size = byte();
        require(size >= 5 && size <= 8);
        const uint64_t value = little_endian(size);
        const size_t bits = 8 * size;
        require(value >> (bits - 1) == 0 && value > INT32_MAX && value >> (bits - 9) != 0);
        return value;
      }
      default:
        throw NotCanonical();
    }
  }

  // A string, of UTF-8 without surrogates. The second takes the longer opcode alone, as pickle does
  // with protocol 3.
  std::string_view text();
  std::string_view long_text();

  // The numbers of a tuple.
  void tuple(std::vector<int64_t>* numbers) {
    numbers->clear();
    if (peek() == op::kTuple0) {
      ++at_;
      return;
    }
    const bool is_long = peek() == op::kMark;
    if (is_long) ++at_;
    while (true) {
      const uint8_t opcode = peek();
      if (is_long ? opcode == op::kTuple : opcode >= op::kTuple1 && opcode <= op::kTuple3) break;
      require(is_long || numbers->size() < 3);
      numbers->push_back(static_cast<int64_t>(number()));
    }
    const uint8_t end = byte();
    require(is_long ? numbers->size() > 3 : numbers->size() + op::kTuple1 == end + size_t{1});
  }

  uint64_t little_endian(size_t size) {
    const uint8_t* const from = take(size);
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{from[i]} << (8 * i);
    return value;
  }

 private:
  std::string_view utf8(uint64_t size);

  uint32_t numbered(uint8_t narrow, uint8_t wide) {
    const uint8_t opcode = byte();
    if (opcode == narrow) return byte();
    require(opcode == wide);
    const auto value = static_cast<uint32_t>(little_endian(4));
    require(value > UINT8_MAX);
    return value;
  }

  const uint8_t* at_;
  const uint8_t* const end_;
};

// Whether these are the opcodes of None, or of a dict of strings to tuples of strings and whole
// numbers, as Python's pickler writes them with protocol 3, and nothing is left behind.
bool is_plain_planner_data(const uint8_t* data, size_t size);

}  // namespace pyckpt
