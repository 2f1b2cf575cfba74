// What reading a pickle will cost, found out without reading it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyckpt {

// A pickle is a program for a small stack machine, and a few bytes of it can ask for gigabytes, for
// a nesting on which hashing recurses until the stack is used up, or for hours of work. What a
// pickler writes does none of this.
struct PickleLimits {
  // How deep containers and calls may be nested, as far as they are inside when they are put into
  // another.
  uint32_t depth;
  // How much may be hashed and passed to calls, in values, where what is shared counts as often as
  // it is met; for each byte of the pickle, beyond kFreeWork.
  uint32_t work_per_byte;
};

constexpr uint64_t kFreeWork = 1 << 20;

// Goes through the opcodes of the pickle that begins at `data`, and makes nothing. Returns how many
// bytes it has, its STOP included. Throws std::invalid_argument where it is damaged, says of itself
// that it is longer than `size`, or is beyond the limits; also where it numbers what it remembers
// by more than it has opcodes, because an unpickler makes room for as many.
size_t scan_pickle(const std::byte* data, size_t size, const PickleLimits& limits);

}  // namespace pyckpt
