// What ranks send each other: numbers of as many bytes as they need, with a checksum around all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pyckpt {

// What kind of thing is packed.
enum class PackedKind : char { kPlan = 'P', kPlaces = 'R', kChecksums = 'C' };

// Puts a header before the bytes, and a checksum of all of it behind them.
std::string seal(PackedKind kind, std::string_view body);

// The kind that sealed bytes say they are. Throws std::invalid_argument for bytes that are not
// sealed, are damaged, or of another version of pyckpt. The message goes on where "the plan of rank
// 3 " ends.
PackedKind kind_of(std::string_view sealed);

// What `seal` was given. Throws as `kind_of`, and for another kind.
std::string_view unseal(PackedKind kind, std::string_view sealed);

class Packer {
 public:
  void byte(uint8_t value) { bytes_ += static_cast<char>(value); }
  // Small ones take one byte; negative ones, as two's complement, ten.
  void number(uint64_t value) {
    while (value >= 0x80) {
      byte(static_cast<uint8_t>(value | 0x80));
      value >>= 7;
    }
    byte(static_cast<uint8_t>(value));
  }
  void number(int64_t value) { number(static_cast<uint64_t>(value)); }
  void word(uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) byte(static_cast<uint8_t>(value >> shift));
  }
  void raw(std::string_view bytes) { bytes_ += bytes; }
  void text(std::string_view text) {
    number(uint64_t{text.size()});
    raw(text);
  }

  size_t size() const { return bytes_.size(); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Takes apart what a Packer made. Throws std::invalid_argument where there is not what is asked
// for.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : left_(bytes) {}

  uint8_t byte() {
    if (left_.empty()) fail();
    const auto value = static_cast<uint8_t>(left_.front());
    left_.remove_prefix(1);
    return value;
  }
  uint64_t number() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const uint8_t next = byte();
      value |= uint64_t{next & 0x7fU} << shift;
      if (next < 0x80) return value;
    }
    fail();
  }
  int64_t signed_number() { return static_cast<int64_t>(number()); }
  uint32_t word() {
    uint32_t value = 0;
    for (int shift = 0; shift < 32; shift += 8) value |= uint32_t{byte()} << shift;
    return value;
  }
  std::string_view raw(uint64_t size) {
    if (size > left_.size()) fail();
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }
  std::string_view text() { return raw(number()); }
  // A number of things that follow, each of which takes a byte at least.
  size_t count() {
    const uint64_t count = number();
    if (count > left_.size()) fail();
    return count;
  }
  bool is_at_end() const { return left_.empty(); }
  void end() const {
    if (!is_at_end()) fail();
  }

  [[noreturn]] static void fail() {
    throw std::invalid_argument("is damaged: it does not say what it should");
  }

 private:
  std::string_view left_;
};

}  // namespace pyckpt
